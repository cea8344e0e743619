"""Tables in Redis, laid out for lookups: a row is a field of a hash, found by the bytes of its key.

A table's rows are spread over hashes ("buckets") of about a quarter of a mebibyte. The bucket of a key is a fixed
function of it (`bucket_of`); in the bucket, the key's bytes are the field and the row's bytes the value, so one HMGET
answers a lookup. Slots, frequencies and versions are in a second hash beside it. One key, `<prefix>:meta`, says which
tables there are and under which generation of keys they lie: a table that is written appears when that key is set, and
not before. The layout is in `redis_layout.py`, and specified in `docs/dialects/redis.md`.
"""

from __future__ import annotations

import json
from typing import Any

from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.redis_layout import NAME, TableKeys, read_meta
from kvtools.dialects.redis_output import Writer
from kvtools.dialects.redis_server import SCHEMES, Place, connect, database_size, place_of, redis_errors, run
from kvtools.dialects.redis_table import RedisTable
from kvtools.dialects.table_record import COUNTER_DTYPES, KEY_DTYPES, VALUE_DTYPES, is_count, table_schema
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError


def sniff(source: Source) -> bool:
    """Tell whether a source is a Redis URL."""
    return source.is_url and source.text.partition("://")[0] in SCHEMES


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables under a prefix of a database.

    Raises:
        BadInputError: the server cannot be reached, or has no tables there.
        CorruptFileError: what describes the tables is damaged.
        UsageError: the URL makes no sense, or an option contradicts the tables.
    """
    place = place_of(source.text)
    doing = f"opening '{place.shown}'"
    client = connect(place)
    (text,) = run(client, [("GET", place.key("meta"))], doing)
    if text is None:
        raise BadInputError(
            f"{doing}: there is no key '{place.key('meta')}', so no tables of kvtools; name the database and the"
            " prefix, as in redis://localhost/0?prefix=ads"
        )
    description = read_meta(text, doing)
    with redis_errors(doing):
        held = database_size(client)
    tables: dict[str, TableReader] = {}
    broken: dict[str, KvtoolsError] = {}
    for number, record in enumerate(description["tables"]):
        name = record.get("name") if isinstance(record.get("name"), str) else f"number {number}"
        try:
            table = _open_table(place, client, record, options, held, f"opening table '{name}' of '{place.shown}'")
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[str(name)] = error
            continue
        tables[table.schema.name] = table
    return Checkpoint(place.shown, NAME, dict(sorted(tables.items())), broken=broken)


def _open_table(
    place: Place, client: Any, record: dict[str, Any], options: OpenOptions, held: int, doing: str
) -> RedisTable:
    schema = table_schema(json.dumps(record), NAME, doing)
    base, buckets = record.get("key"), record.get("buckets")
    # Few buckets are empty, so there are not many more of them than keys in the database.
    if not is_count(buckets) or buckets < 1 or buckets & (buckets - 1) or buckets > 4 * held + 64:
        raise CorruptFileError(
            f"{doing}: got {json.dumps(buckets)[:20]} buckets in a database of {held} keys, expected a power of two,"
            " and most of them there; write it again"
        )
    if not isinstance(base, str) or schema.parts != 1:
        raise CorruptFileError(f"{doing}: its description has no key, or many parts; write it again")
    return RedisTable(place, client, schema, TableKeys(base, buckets))


DIALECT = Dialect(
    name=NAME,
    title="tables in Redis, under a URL such as redis://localhost/0",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="url",
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        freq_dtypes=COUNTER_DTYPES,
        version_dtypes=COUNTER_DTYPES,
        many_parts=False,
        extras=None,
        metadata=None,
    ),
)
