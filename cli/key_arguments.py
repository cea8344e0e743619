"""Keys on the command line: any number of them, and negative ones, which a parser takes for options."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBERS = re.compile(r"[+-]?\d+(,[+-]?\d+)*,?")
_NEGATIVE = re.compile(r"-\d+(,[+-]?\d+)*,?")
_OF_NUMBERS = frozenset({"-k", "--dim"})
"""Options of commands with keys whose value is a number, and no key."""


def are_keys(text: str) -> bool:
    """Tell whether a word is a number, or numbers with commas between.

    >>> are_keys("5,-7"), are_keys("-x")
    (True, False)
    """
    return bool(_NUMBERS.fullmatch(text))


def spread_option(arguments: Sequence[str], option: str) -> list[str]:
    """Let an option take all the numbers that follow it, which the parser knows only as one option each.

    >>> spread_option(["inspect", "a", "--keys", "5", "-7", "--json"], "--keys")
    ['inspect', 'a', '--keys=5', '--keys=-7', '--json']
    """
    spread: list[str] = []
    after_option = False
    for number, argument in enumerate(arguments):
        if argument == "--":
            return spread + list(arguments[number:])
        if argument == option:
            following = arguments[number + 1] if number + 1 < len(arguments) else ""
            after_option = are_keys(following)
            if not after_option:
                spread.append(argument)
        elif after_option and are_keys(argument):
            spread.append(f"{option}={argument}")
        else:
            after_option = False
            spread.append(argument)
    return spread


def mark_negative(arguments: Sequence[str]) -> list[str]:
    """Put a comma before each negative number, so that the parser takes it for no option; `key_words` knows.

    >>> mark_negative(["get", "a", "5", "-7", "--json", "--dim", "-3"])
    ['get', 'a', '5', ',-7', '--json', '--dim', '-3']
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    marked = [
        f",{argument}" if _NEGATIVE.fullmatch(argument) and before not in _OF_NUMBERS else argument
        for before, argument in zip(["", *arguments], arguments[:end], strict=False)
    ]
    return marked + list(arguments[end:])


def key_words(arguments: Sequence[str]) -> list[str]:
    """Return the single numbers of arguments that may hold several.

    >>> key_words(["5", ",-7", "8,9,"])
    ['5', '-7', '8', '9']
    """
    return [word for argument in arguments for word in argument.split(",") if word]
