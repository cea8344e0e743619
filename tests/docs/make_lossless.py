"""Write the tables of docs/lossless.md anew: python -P tests/docs/make_lossless.py"""

from __future__ import annotations

from pathlib import Path

from kvtools.lossless import page_tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lossless.md"
MARK = "<!-- The rest is made by tests/docs/make_lossless.py. -->\n\n"


def page() -> str:
    """The page as the code would have it."""
    return PAGE.read_text().partition(MARK)[0] + MARK + page_tables()


if __name__ == "__main__":
    PAGE.write_text(page())
