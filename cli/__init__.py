"""The `kvtools` command: `main.py`, which `start.py` loads, and a file per command that parses, calls and prints."""
