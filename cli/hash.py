"""`kvtools hash`: the keys of strings."""

from __future__ import annotations

import os
import sys
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from itertools import chain, islice
from typing import Annotated, BinaryIO

import typer

from kvtools.cli.json_text import dumps
from kvtools.cli.options import AsJson
from kvtools.errors import BadInputError, UsageError
from kvtools.remote.stored import open_binary
from kvtools.string_hash import string_keys

_LINES = 1 << 16
_UTF16 = "in UTF-16, expected UTF-8: `iconv -f UTF-16`"
_NO_TEXT = {
    BOM_UTF16_LE: _UTF16,
    BOM_UTF16_BE: _UTF16,
    b"\x1f\x8b": "compressed, expected text: `zcat FILE | kvtools hash --file -`",
    b"PK\x03\x04": "a zip archive, expected text",
    b"\x93NUMPY": "an array of NumPy, expected text; kvtools.string_keys takes arrays",
}
"""What a file begins with that has no strings in its lines."""


def run(
    strings: Annotated[list[str] | None, typer.Argument(metavar="STRING...", help="Strings; -- before -one.")] = None,
    *,
    file: Annotated[
        str | None, typer.Option("--file", metavar="FILE", help="More strings, one in each line; - for stdin.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the keys that strings have in tables: layers and variables of strings hold their hashes.

    A key in each line, in the order of the strings; --json has the strings, too. The hash is FarmHash's Fingerprint64
    modulo 9221902955305123200, that of tf.strings.to_hash_bucket_fast, for the bytes as they are (UTF-8).

    \b
    Examples:
      kvtools hash wine
      kvtools hash red wine --json
      kvtools hash --file ids.txt > ids.keys && kvtools clip model.ckpt-100 out.ckpt --drop-keys-file ids.keys
      cut -f1 clicks.tsv | kvtools hash --file - > ids.keys
    """
    if not strings and file is None:
        raise UsageError("hashing strings: got none, expected some, or --file")
    before = '{"keys": ['
    for block in _blocks([os.fsencode(string) for string in strings or []], file):
        keys = string_keys(block).tolist()
        if as_json:
            told = [
                {"string": string.decode("utf-8", "backslashreplace"), "key": key}
                for string, key in zip(block, keys, strict=True)
            ]
            print(before + dumps(told)[1:-1], end="")
            before = ", "
        else:
            print("\n".join(map(str, keys)))
    if as_json:
        print("]}" if before == ", " else '{"keys": []}')


def _blocks(strings: list[bytes], file: str | None) -> Iterator[list[bytes]]:
    if strings:
        yield strings
    if file == "-":
        yield from _lines(sys.stdin.buffer, "standard input")
    elif file is not None:
        try:
            with open_binary(file) as opened:
                yield from _lines(opened, f"'{file}'")
        except OSError as error:
            raise BadInputError(f"reading strings from '{file}': {error.strerror or error}") from error


def _lines(file: BinaryIO, source: str) -> Iterator[list[bytes]]:
    first = file.readline()
    for mark, what in _NO_TEXT.items():
        if first.startswith(mark):
            raise BadInputError(f"reading strings from {source}: it is {what}")
    rest = chain([first.removeprefix(BOM_UTF8)], file) if first else iter(())
    while block := [line.removesuffix(b"\n").removesuffix(b"\r") for line in islice(rest, _LINES)]:
        yield block
