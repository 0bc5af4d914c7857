"""The plan journal: every event that the core was given, with its time, and what it decided, in a file that can be replayed."""
