"""Options that are given twice: where one is for a single value, the first would be lost without a word."""

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


class Command(TyperCommand):
    """A command that takes each option for a single value once. Flags may come again: they say the same."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind the command's name.

        Raises:
            UsageError: an option that takes one value is there twice.
        """
        if not ctx.resilient_parsing:  # as for completion, which takes what is there
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            for option, times in Counter(order).items():
                if times > 1 and option.param_type_name == "option" and _is_single(option):
                    name = max(option.opts, key=len)
                    raise UsageError(f"got {name} {times} times, expected it once{_hint(name)}")
        return super().parse_args(ctx, args)


def _is_single(option: Any) -> bool:
    return not (option.multiple or option.is_flag or getattr(option, "count", False))


def _hint(name: str) -> str:
    return f"; {_TOGETHER[name]}" if name in _TOGETHER else ""
