"""`kvtools hash`: the keys of strings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, BinaryIO

import typer

from kvtools.cli.json_text import dumps
from kvtools.cli.options import AsJson
from kvtools.errors import BadInputError, UsageError
from kvtools.remote.stored import open_binary
from kvtools.string_hash import string_keys

_LINES = 1 << 16


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
      kvtools get model.ckpt-100 --table word $(kvtools hash red wine)
      cut -f1 names.tsv | kvtools hash --file - | kvtools get model.ckpt-100 --table name --keys-file -
      kvtools hash --file blocked.txt > blocked.keys && kvtools clip model.ckpt-100 out.ckpt --drop-keys blocked.keys
    """
    if not strings and file is None:
        raise UsageError("hashing strings: got none, expected some, or --file")
    listed: list[dict[str, object]] = []
    for block in _blocks([os.fsencode(string) for string in strings or []], file):
        keys = string_keys(block).tolist()
        if as_json:
            listed += [
                {"string": string.decode("utf-8", "backslashreplace"), "key": key}
                for string, key in zip(block, keys, strict=True)
            ]
        else:
            print("\n".join(map(str, keys)))
    if as_json:
        print(dumps({"keys": listed}))


def _blocks(strings: list[bytes], file: str | None) -> Iterator[list[bytes]]:
    if strings:
        yield strings
    if file == "-":
        yield from _lines(sys.stdin.buffer)
    elif file is not None:
        try:
            with open_binary(file) as opened:
                yield from _lines(opened)
        except OSError as error:
            raise BadInputError(f"reading strings from '{file}': {error.strerror or error}") from error


def _lines(file: BinaryIO) -> Iterator[list[bytes]]:
    while block := [line.removesuffix(b"\n").removesuffix(b"\r") for line in islice(file, _LINES)]:
        yield block
