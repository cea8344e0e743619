"""The JSON description of a table: everything comes back, and nothing malformed is taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import round_trip
from hypothesis import given
from hypothesis import strategies as st

from kvtools.dialects.safe_name import safe_name
from kvtools.dialects.schema import TableSchema
from kvtools.dialects.table_record import table_json, table_schema
from kvtools.errors import BadInputError, CorruptFileError

SCHEMA = round_trip.table("ads/emb", 30, parts=2).schema


def read(record: Any) -> TableSchema:
    return table_schema(json.dumps(record), "test", "opening 'x'")


def test_everything_comes_back() -> None:
    got = table_schema(table_json(SCHEMA), "memory", "opening 'x'")
    assert table_json(got) == table_json(SCHEMA)
    assert (got.slots, got.extras, got.metadata) == (SCHEMA.slots, SCHEMA.extras, SCHEMA.metadata)


@pytest.mark.parametrize("field", json.loads(table_json(SCHEMA)))
def test_a_field_that_is_missing_or_of_another_kind_is_named(field: str) -> None:
    for value in ("nothing", None, [], {}, -1, 1.5, True, [None], [{"name": 1}], "float31"):
        record = json.loads(table_json(SCHEMA))
        if value == "nothing":
            del record[field]
        else:
            record[field] = value
        try:
            read(record)
        except CorruptFileError as error:
            assert f"field '{field}'" in str(error)
        else:
            assert value != "nothing"


def test_later_layouts_ask_for_a_later_kvtools() -> None:
    with pytest.raises(BadInputError, match="update kvtools"):
        read(json.loads(table_json(SCHEMA)) | {"layout": 2})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\udc80"])
def test_what_is_no_object_is_malformed(text: str) -> None:
    with pytest.raises(CorruptFileError, match="malformed"):
        table_schema(text, "test", "opening 'x'")


def test_two_slots_of_one_name() -> None:
    record = json.loads(table_json(SCHEMA))
    record["slots"].append(record["slots"][0])
    with pytest.raises(CorruptFileError, match="have one name"):
        read(record)


@given(st.text(max_size=300), st.text(max_size=300))
def test_different_names_make_different_components_of_a_path(a: str, b: str) -> None:
    for name in (a, b):
        safe = safe_name(name)
        assert safe and "/" not in safe and safe[0] not in "._" and len(safe.encode()) < 250
    assert (safe_name(a) == safe_name(b)) == (a == b)
