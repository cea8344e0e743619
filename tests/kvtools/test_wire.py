from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.dialects.bundle.wire import WireError, put_varint, read_fields, read_varint


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3))
def test_varint_round_trip(value: int, after: bytes) -> None:
    encoded = put_varint(value)
    assert read_varint(encoded + after, 0) == (value, len(encoded))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 11])
def test_varint_that_does_not_end_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        read_varint(data, 0)


@given(st.binary(max_size=40))
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    try:
        fields = list(read_fields(data))
    except WireError:
        return
    assert all(isinstance(value, int | bytes) for _, value in fields)
