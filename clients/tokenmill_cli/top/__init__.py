"""`tokenmill top`: looks at a scheduler again and again (`history.py`) and draws what they come to (`frame.py`, `sections.py`)."""
