"""Answers of HTTP/1.1 out of bytes, however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.client import BadAnswerError
from kvtools.client.endpoint import endpoint_of
from kvtools.client.http_answer import AnswerReader, Request

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n1\r\n \r\n5\r\nworld\r\n0\r\nA: b\r\n\r\n"
)


def read(data: bytes, cuts: list[int], limit: int = 1 << 20) -> AnswerReader:
    reader = AnswerReader(limit)
    at = 0
    for size in [*cuts, len(data)]:
        while size and at < len(data):
            room = reader.buffer()
            count = min(size, len(room), len(data) - at)
            room[:count] = data[at : at + count]
            at += count
            size -= count
            if reader.received(count):
                assert at == len(data) or not reader.keep_alive
                return reader
    return reader


@given(st.lists(st.integers(1, 30), max_size=40), st.binary(max_size=300))
def test_a_body_of_known_length(cuts: list[int], body: bytes) -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-LENGTH: %d\r\nX-A:  b \r\n\r\n" % len(body)
    reader = read(data + body, cuts)
    assert reader.answer is not None and reader.keep_alive
    assert (reader.answer.status, reader.answer.headers["x-a"]) == (200, "b")
    assert reader.answer.body.tobytes() == body
    assert reader.answer.body.flags.writeable


@given(st.lists(st.integers(1, 30), max_size=40))
def test_a_chunked_body(cuts: list[int]) -> None:
    reader = read(CHUNKED, cuts)
    assert reader.answer is not None and reader.keep_alive
    assert reader.answer.body.tobytes() == b"hello world"


def test_a_body_that_ends_with_the_connection() -> None:
    reader = read(b"HTTP/1.0 200 OK\r\n\r\nhello", [])
    assert reader.answer is None
    assert reader.ended() and reader.answer is not None and not reader.keep_alive
    assert reader.answer.body.tobytes() == b"hello"


def test_a_connection_that_ends_too_early_is_no_answer() -> None:
    assert not read(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", []).ended()
    assert not read(CHUNKED[:-5], []).ended()
    assert not read(b"HTTP/1.1 200 OK\r\n", []).ended()


def test_bytes_after_the_answer_end_the_connection() -> None:
    assert not read(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab", []).keep_alive
    assert not read(CHUNKED + b"HTTP/1.1 200", []).keep_alive


def test_a_connection_that_the_server_closes_is_not_kept() -> None:
    assert not read(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close\r\n\r\n", []).keep_alive
    assert not read(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", []).keep_alive


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"fffff\r\n" + b"a" * 70_000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
    ],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(BadAnswerError):
        read(data, [], limit=1 << 16)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            b"-ERR wrong number of arguments for 'get' command\r\n",
            "this is no kvtools server but one that speaks the Redis",
        ),
        (b"\x15\x03\x01", "this is no kvtools server but one that speaks TLS"),
        (b"\0\0\x18\x04", "this is no kvtools server; check the port of the URL"),
        (b"HTTQ", "got b'HTTQ', expected an answer of HTTP/1.1"),
    ],
)
def test_another_protocol_is_told_by_its_first_bytes(data: bytes, said: str) -> None:
    with pytest.raises(BadAnswerError, match=said):
        read(data, [])


@given(st.binary(max_size=200), st.lists(st.integers(1, 30), max_size=10))
def test_any_bytes_are_taken_or_refused(data: bytes, cuts: list[int]) -> None:
    try:
        read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data, cuts)
        read(data, cuts)
    except BadAnswerError:
        pass


def test_a_small_request_is_one_piece_and_a_large_one_is_not_copied() -> None:
    endpoint = endpoint_of("http://host:8501/prefix/")
    small = Request("POST", "/v1/tables:lookup", {"Accept": "x"}, b"keys").bytes_for(endpoint)
    assert small[0].splitlines()[:2] == [b"POST /prefix/v1/tables:lookup HTTP/1.1", b"Host: host:8501"]  # type: ignore[union-attr]
    assert len(small) == 1 and small[0].endswith(b"Content-Length: 4\r\n\r\nkeys")  # type: ignore[union-attr]
    large = bytes(100_000)
    assert Request("POST", "/x", {}, large).bytes_for(endpoint)[1] is large
