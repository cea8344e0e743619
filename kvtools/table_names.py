"""Tables, slots and columns by what a user calls them: patterns as for file names, and names that are nearly right."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

_NAMES_SHOWN = 8


def matching(patterns: Sequence[str], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names that are one of `patterns`, or match one, in the patterns' order, each once; and the patterns
    that no name is or matches.

    `*` is any text, with "/" in it, `?` any character, `[ab]` one of these. A name that is the pattern itself is meant
    before all that match it: a table may be called "a[1]".

    >>> matching(["deep/*", "wide", "gone"], ["wide", "deep/user", "deep/item", "a[1]"])
    (['deep/user', 'deep/item', 'wide'], ['gone'])
    >>> matching(["a[1]"], ["a1", "a[1]"])
    (['a[1]'], [])
    """
    there = dict.fromkeys(names)
    found: dict[str, None] = {}
    unmatched = []
    for pattern in patterns:
        if pattern in there:
            found[pattern] = None
            continue
        matches = [name for name in there if is_pattern(pattern) and fnmatch.fnmatchcase(name, pattern)]
        found.update(dict.fromkeys(matches))
        if not matches:
            unmatched.append(pattern)
    return list(found), unmatched


def is_pattern(name: str) -> bool:
    """Tell whether a name that nothing has may stand for several.

    >>> is_pattern("deep/*"), is_pattern("deep/user")
    (True, False)
    """
    return any(character in name for character in "*?[")


def near(name: str, names: Iterable[str]) -> str:
    """Return a question that goes behind a message about a name that there is not; "" where no other is like it.

    >>> near("user_em", ["user_emb", "item_emb"])
    "; did you mean 'user_emb'?"
    >>> near("USER", ["user"]), near("xyz", ["user"])
    ("; did you mean 'user'?", '')
    """
    there = list(dict.fromkeys(names))
    folded = {one.casefold(): one for one in reversed(there)}
    same_end = [one for one in there if one.rpartition("/")[2].casefold() == name.rpartition("/")[2].casefold()]
    found = [folded[name.casefold()]] if name.casefold() in folded else same_end[:2]
    found = found or difflib.get_close_matches(name, there, 2, 0.6)
    return f"; did you mean {' or '.join(repr(one) for one in found)}?" if found else ""


def listed(names: Iterable[str]) -> str:
    """Return the first of these names, and how many more there are, for a message.

    >>> listed(["a", "b"])
    "'a', 'b'"
    """
    there = list(names)
    more = f" and {len(there) - _NAMES_SHOWN} more" if len(there) > _NAMES_SHOWN else ""
    return ", ".join(f"'{name}'" for name in there[:_NAMES_SHOWN]) + more if there else "no tables"
