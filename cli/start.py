"""What the `kvtools` script calls: `main.py`, and nothing else that takes time to import."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line, as `kvtools.cli.main.main` does; Ctrl-C while that is imported ends it likewise."""
    try:
        from kvtools.cli.main import main
    except KeyboardInterrupt:
        print("kvtools: interrupted", file=sys.stderr)
        return 130
    return main()
