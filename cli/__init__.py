"""The `kvtools` command: `main.py`, and one thin file per command that parses, calls and prints."""
