"""What the fields of a row are called in every output: `key`, `value`, `freq`, `version`; slots by their own names."""

from __future__ import annotations

FIELDS = ("value", "freq", "version", "norm", "part", "slots")
"""What a row has beside its key; `slots` stands for all of them. `norm` and `part` are computed, and shown where they
are asked for."""

_SYNONYMS = {"keys": "key", "values": "value", "freqs": "freq", "versions": "version", "slot": "slots"}


def field_name(name: str) -> str:
    """Return the name of a field, which may be given in the plural.

    >>> field_name("freqs"), field_name("Adam.m")
    ('freq', 'Adam.m')
    """
    return _SYNONYMS.get(name, name)


def field_of(column: str) -> str:
    """Return the field that a column of a comparison or a cast is.

    >>> field_of("values"), field_of("slot:Adam.m"), field_of("slot Adam.m")
    ('value', 'Adam.m', 'Adam.m')
    """
    for prefix in ("slot:", "slot "):
        if column.startswith(prefix):
            return column.removeprefix(prefix)
    return field_name(column)
