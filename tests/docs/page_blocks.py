"""The code blocks of a page: what tests of pages run, and what a page leaves out by `no-run`."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)( no-run)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, whether it says `no-run`, its text, and the line of the page where that begins."""

    language: str
    no_run: bool
    text: str
    line: int


@dataclass
class Command:
    """A line of a console block behind its `$ `, and the lines that it prints there."""

    text: str
    line: int
    printed: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        """The words of the command, without the comment at its end."""
        return shlex.split(self.text, comments=True)


def blocks(page: str) -> list[Block]:
    """All blocks of a page, named from the repository's root."""
    text = (ROOT / page).read_text()
    return [
        Block(match[1], bool(match[2]), match[3], text[: match.start(3)].count("\n") + 1)
        for match in FENCE.finditer(text)
    ]


def commands(block: Block) -> list[Command]:
    """The commands of a console block."""
    found: list[Command] = []
    going_on = False
    for number, line in enumerate(block.text.splitlines()):
        if going_on:
            found[-1].text += "\n" + line
        elif line.startswith("$ "):
            found.append(Command(line[2:], block.line + number))
        elif line.strip() and found:
            found[-1].printed.append(line.rstrip())
        going_on = line.endswith("\\") and (going_on or line.startswith("$ "))
    return found


def pages() -> list[str]:
    """Every page that has blocks for people: the README and `docs/`."""
    return ["README.md", *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md")))]
