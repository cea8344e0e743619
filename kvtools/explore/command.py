"""The `kvtools clip` command that does what thresholds show, ready for a shell.

The parts that depend on names are quoted here, once, for the page and the terminal alike: a name may hold whatever a
file can hold, and nothing of it is taken for another word, another line, or the opposite of what is seen.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from kvtools.remote.paths import shown_path
from kvtools.thresholds import Threshold
from kvtools.url_password import without_password

_END = "POLICY"


@dataclass(frozen=True)
class ClipSource:
    """What is clipped: `path` as it was given, where to write, and the options that say how to read it.

    Example:
        >>> ClipSource.of("run 1/model.ckpt-100").output
        'run 1/model-clipped.ckpt-100'
    """

    path: str
    output: str
    options: tuple[str, ...] = ()

    @staticmethod
    def of(path: str, dialect: str = "", options: Sequence[str] = ()) -> ClipSource:
        """Return the source at a path, and a place beside it; no password of a URL is repeated."""
        path = without_password(shown_path(path))
        if dialect == "redis" or path.startswith(("redis://", "rediss://", "unix://")):
            return ClipSource(path, "clipped.parquet", (*options, "--to", "parquet"))
        folder, slash, name = path.rstrip("/").rpartition("/")
        stem, dot, suffix = name.partition(".")
        clipped = f"{stem}-clipped{dot}{suffix}" if stem.strip(".") else f"{name}-clipped".lstrip(".")
        return ClipSource(path, f"{folder}{slash}{clipped}", tuple(options))


def clip_command(source: ClipSource, chosen: Sequence[tuple[str, Sequence[Threshold]]], output: str | None) -> str:
    """Return the command that cuts what thresholds of some tables cut.

    Args:
        source: what to clip.
        chosen: tables by name, and the thresholds of each, at least one.
        output: where to write; with None it only says what would be cut.

    >>> rare = Threshold("freq", 2, "2", ("--min-freq", "2"), ("min-freq = 2",), 10)
    >>> print(clip_command(ClipSource.of("a.h5"), [("user emb", [rare])], None))
    kvtools clip a.h5 --table='user emb' --min-freq 2 --dry-run
    """
    words = ["kvtools clip", shell_quoted(source.path)]
    if output is not None:
        words.append(shell_quoted(output))
    words += [table_option(name) for name, _ in chosen]
    options = [shell_quoted(word) for word in source.options] + (["--dry-run"] if output is None else [])
    same = {tuple(word for one in thresholds for word in one.options) for _, thresholds in chosen}
    if len(same) == 1:
        return " ".join([*words, *map(shell_quoted, same.pop()), *options])
    lines = [" ".join([*words, *options, "--policy /dev/stdin", f"<<'{_END}'"])]
    for name, thresholds in chosen:
        lines += [policy_entry(name), *(line for one in thresholds for line in one.policy)]
    return "\n".join([*lines, _END])


def table_option(name: str) -> str:
    """Return the option that names a table, for a shell.

    >>> table_option("user"), table_option("it's")
    ('--table=user', '--table=\\'it\\'"\\'"\\'s\\'')
    """
    return f"--table={shell_quoted(name)}"


def policy_entry(name: str) -> str:
    """Return the lines that begin the entry of a table in a policy file.

    >>> print(policy_entry("a*"))
    [[tables]]
    name = "a[*]"
    """
    pattern = re.sub(r"([*?[])", r"[\1]", name)
    return f"[[tables]]\nname = {_toml_text(pattern)}"


def shell_quoted(text: str) -> str:
    """Return a text as one word of bash or zsh, of printable characters alone.

    >>> shell_quoted("a b"), shell_quoted("line" + chr(10)), shell_quoted(chr(0x202E))
    ("'a b'", "$'line\\\\x0a'", "$'\\\\xe2\\\\x80\\\\xae'")
    """
    if text.isprintable():
        return shlex.quote(text)
    escaped = "".join(
        f"\\{c}" if c in "\\'" else c if c.isprintable() else "".join(f"\\x{byte:02x}" for byte in _bytes(c))
        for c in text
    )
    return f"$'{_unambiguous(escaped)}'"


def _unambiguous(escaped: str) -> str:
    """Part `\\xhh` from a digit behind it, which some shells would read on to."""
    return re.sub(r"(\\x[0-9a-f]{2})(?=[0-9A-Fa-f])", r"\1'$'", escaped)


def _bytes(c: str) -> bytes:
    return c.encode("utf-8", "surrogateescape")


def _toml_text(text: str) -> str:
    """Return a text as TOML has it, of printable characters alone."""
    escaped = "".join(
        f"\\{c}"
        if c in '\\"'
        else c
        if c.isprintable()
        else f"\\U{ord(c):08X}"
        if ord(c) > 0xFFFF
        else f"\\u{ord(c):04X}"
        for c in text
    )
    return f'"{escaped}"'
