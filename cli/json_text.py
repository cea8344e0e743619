"""JSON of commands: as `json.dumps`, and with `--string-keys` keys as strings.

A key has 64 bits. JavaScript, jq and others read numbers as float64, and round those above 2**53.
"""

from __future__ import annotations

import json
from typing import Any

from kvtools.cli.shared_options import shared

_KEYS = frozenset({"key", "keys", "missing", "added_keys", "removed_keys", "born_keys", "changed_keys"})
"""Fields that hold a key, or a list of keys."""


def string_keys() -> bool:
    """Tell whether keys are to be written as strings."""
    return shared().string_keys


def dumps(record: Any) -> str:
    """Return a record (dicts, lists, numbers, strings) as JSON, its keys as `--string-keys` says."""
    return json.dumps(with_string_keys(record) if string_keys() else record)


def with_string_keys(record: Any) -> Any:
    """Return a record with strings in place of integers in the fields that hold keys.

    >>> with_string_keys({"rows": [{"key": 2**60, "freq": 3}], "missing": [5]})
    {'rows': [{'key': '1152921504606846976', 'freq': 3}], 'missing': ['5']}
    """
    if isinstance(record, dict):
        return {name: _strings(value) if name in _KEYS else with_string_keys(value) for name, value in record.items()}
    if isinstance(record, list | tuple):
        # A list of numbers has no fields: a row's values are not looked through one by one.
        return [with_string_keys(item) for item in record] if any(isinstance(i, dict) for i in record[:1]) else record
    return record


def _strings(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_strings(item) for item in value]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else with_string_keys(value)
