"""What is checked of words before they are values.

Options that are given twice: where one is for a single value, the first would be lost without a word. Empty names of
files, as of a variable of the shell that is not set: to the system they would be the working folder.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand

from kvtools.errors import UsageError

_TOGETHER = {
    "--where": "join conditions with `and`",
    "--drop-where": "join conditions with `or`",
    "--columns": "join names with commas",
}
"""How what several of an option would say is said with one."""

_FILES = frozenset({"PATH", "OUT", "FILE", "FOLDER", "CHAIN", "[NAME=]CHAIN"})
"""What stands for the name of a file or folder, as the value of an option."""
_NO_FILES = frozenset({"KEY", "KEY...", "STRING...", "[COMMAND]"})
"""What stands for something else, as an argument."""


class Command(TyperCommand):
    """A command that takes each option for a single value once, and no empty names of files. Flags may come again: they
    say the same."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind the command's name.

        Raises:
            UsageError: an option that takes one value is there twice; the name of a file is empty.
        """
        if not ctx.resilient_parsing:  # as for completion, which takes what is there
            words, _, order = self.make_parser(ctx).parse_args(args=list(args))
            for option, times in Counter(order).items():
                if times > 1 and option.param_type_name == "option" and _is_single(option):
                    name = max(option.opts, key=len)
                    raise UsageError(f"got {name} {times} times, expected it once{_hint(name)}")
            for parameter in self.params:
                metavar = _of_files(parameter)
                word = words.get(str(parameter.name))
                given = list(word) if isinstance(word, (list, tuple)) else [word]
                if metavar and "" in (given[:-1] if metavar.endswith("QUERY") else given):
                    is_option = parameter.param_type_name == "option"
                    raise UsageError(
                        f"got an empty {max(parameter.opts, key=len) if is_option else metavar}, expected a file or "
                        "folder, . for this one: is a variable not set?"
                    )
        return super().parse_args(ctx, args)


def _is_single(option: Any) -> bool:
    return not (option.multiple or option.is_flag or getattr(option, "count", False))


def _of_files(parameter: Any) -> str:
    """Return what stands for the value where that names files or folders, otherwise nothing."""
    metavar: str = parameter.metavar or ""
    if parameter.param_type_name == "option":
        return metavar if metavar in _FILES else ""
    return "" if metavar in _NO_FILES or "|" in metavar else metavar


def _hint(name: str) -> str:
    return f"; {_TOGETHER[name]}" if name in _TOGETHER else ""
