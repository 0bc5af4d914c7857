"""Drives the production core with model executors under a virtual clock: what a policy, a limit or a machine would do to a load.

It imports `tokenmill_scheduler.core` and numpy, nothing else of tokenmill. Must not know: the command line, files of results, gRPC.
"""
