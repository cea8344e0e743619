"""Stores on bad days: connections that die, answers that are cut, refusals, other files than those that were listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_bucket import Bucket
from s3_proxy import Answer, Request, refusal

import kvtools
from kvtools.array_table import ArrayTable
from kvtools.errors import BadInputError, KvtoolsError
from kvtools.migrate import write_tables
from kvtools.remote import block_cache, remote_file, store
from kvtools.remote.paths import local_path

ROWS = 60_000
VALUES = np.random.default_rng(3).normal(size=(ROWS, 16)).astype(np.float32)


@pytest.fixture
def url(bucket: Bucket, tmp_path: Path) -> str:
    write_tables([ArrayTable("emb", np.arange(ROWS), VALUES)], tmp_path / "m" / "model.ckpt", "tfplugin")
    return f"{bucket.put(tmp_path / 'm', 'm')}/model.ckpt"


def values(url: str) -> np.ndarray:
    return np.concatenate([chunk.values for chunk in kvtools.open(url).table("emb").chunks()])


def of_rows(request: Request) -> bool:
    return request.method == "GET" and ".data-" in request.path


def test_a_connection_that_dies_goes_on_where_it_stood(bucket: Bucket, url: str) -> None:
    piece = 300_000

    def fault(request: Request, answer: Answer) -> Answer:
        if of_rows(request) and len(answer.body) > piece:
            answer.cut = piece
        return answer

    bucket.proxy.fault = fault
    np.testing.assert_array_equal(values(url), VALUES)
    asked = [one.range for one in bucket.proxy.gets(".data-") if one.range]
    starts = sorted(first for first, _ in asked)
    size = VALUES.nbytes
    assert len(asked) > size // piece  # each connection brought its piece
    assert sum(one.answered for one in bucket.proxy.gets(".data-")) < size * 1.2  # and no piece came twice
    assert len(set(starts)) == len(starts)


def test_a_store_whose_connections_bring_nothing_is_given_up(bucket: Bucket, url: str) -> None:
    opened = kvtools.open(url).table("emb")

    def fault(request: Request, answer: Answer) -> Answer:
        answer.cut = 10
        return answer

    bucket.proxy.reset()
    bucket.proxy.fault = fault
    with pytest.raises(BadInputError, match="breaks off; check the endpoint"):
        list(opened.chunks())
    by_start: dict[Any, int] = {}
    for one in bucket.proxy.gets(".data-"):
        by_start[one.range and one.range[1]] = by_start.get(one.range and one.range[1], 0) + 1
    assert max(by_start.values()) <= store.TRIES
    bucket.proxy.reset()  # the store is back: what failed is asked for again
    np.testing.assert_array_equal(np.concatenate([chunk.values for chunk in opened.chunks()]), VALUES)


@pytest.mark.parametrize("shorter", [0, 1, 70_000])
def test_an_answer_that_is_too_short_is_asked_for_again(bucket: Bucket, url: str, shorter: int) -> None:
    def fault(request: Request, answer: Answer) -> Answer:
        if of_rows(request) and request.number % 2 == 1 and len(answer.body) > 70_000:
            answer.body = answer.body[:shorter]  # with a length to match: a server that lies
        return answer

    bucket.proxy.fault = fault
    np.testing.assert_array_equal(values(url), VALUES)


def test_a_range_of_another_place_is_refused(bucket: Bucket, url: str) -> None:
    def fault(request: Request, answer: Answer) -> Answer:
        if of_rows(request) and request.range and "content-range" in answer.headers:
            first, last = request.range
            size = answer.headers["content-range"].rpartition("/")[2]
            answer.headers["content-range"] = f"bytes {first + 8}-{last}/{size}"
            answer.body = answer.body[8:]
        return answer

    opened = kvtools.open(url).table("emb")
    bucket.proxy.fault = fault
    with pytest.raises(BadInputError, match="expected bytes"):
        list(opened.chunks())


def test_a_server_without_ranges_is_refused(bucket: Bucket, url: str) -> None:
    def before(request: Request) -> Answer | None:
        return Answer(200, {"etag": '"x"'}, b"x" * 1000) if of_rows(request) else None

    bucket.proxy.before = before
    with pytest.raises(BadInputError, match="gives no ranges"):
        list(kvtools.open(url).table("emb").chunks())


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (403, "AccessDenied", "denies access"),
        (403, "InvalidAccessKeyId", "does not know these credentials"),
        (403, "SignatureDoesNotMatch", "refuses these credentials"),
        (403, "RequestTimeTooSkewed", "the clock of this machine differs"),
        (403, "ExpiredToken", "have expired"),
        (404, "NoSuchKey", "it is not there"),
        (412, "PreconditionFailed", "changed while it was read"),
        (416, "InvalidRange", "shorter than it was"),
    ],
)
def test_a_refusal_is_told_at_once(bucket: Bucket, url: str, status: int, code: str, told: str) -> None:
    opened = kvtools.open(url).table("emb")
    bucket.proxy.reset()
    secret = "AKIDEXAMPLEOFTEST wJalrXUtnFEMI/K7MDENG+secretOfTest"
    bucket.proxy.before = lambda request: refusal(status, code, f"for {secret}") if of_rows(request) else None
    with pytest.raises(BadInputError, match=told) as raised:
        list(opened.chunks())
    assert "secretOfTest" not in str(raised.value) and "AKID" not in str(raised.value)
    assert url in str(raised.value)
    by_range = {one.range for one in bucket.proxy.gets(".data-")}
    assert len(by_range) == len(bucket.proxy.gets(".data-"))  # nothing is asked for twice


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (503, "SlowDown"),
        pytest.param(500, "InternalError", marks=pytest.mark.thorough),
        pytest.param(429, "TooManyRequests", marks=pytest.mark.thorough),
    ],
)
def test_a_busy_store_is_asked_again_later(
    bucket: Bucket, url: str, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(store, "_sleep", pauses.append)
    seen: dict[Any, int] = {}

    def before(request: Request) -> Answer | None:
        seen[request.path, request.range] = seen.get((request.path, request.range), 0) + 1
        return refusal(status, code) if seen[request.path, request.range] <= 2 else None

    bucket.proxy.before = before
    np.testing.assert_array_equal(values(url), VALUES)
    assert pauses and max(pauses) <= 5 and pauses[0] < 0.5
    bucket.proxy.reset()
    bucket.proxy.before = lambda request: refusal(status, code)
    with pytest.raises(BadInputError) as raised:
        kvtools.open(url)
    assert len(bucket.proxy.requests) == store.TRIES
    assert "listing 's3://" in str(raised.value)


def test_listing_that_is_denied_is_told(bucket: Bucket, url: str) -> None:
    bucket.proxy.before = lambda request: refusal(403, "AccessDenied")
    with pytest.raises(BadInputError, match="denies access; check the credentials"):
        kvtools.open(url)


@pytest.mark.parametrize("name", ["x", "folder/model.ckpt", ""])
def test_a_bucket_that_is_not_there_is_told(bucket: Bucket, name: str) -> None:
    with pytest.raises(KvtoolsError, match=r"'s3://no-such-bucket.*NoSuchBucket: there is no such bucket; check its"):
        kvtools.open(f"s3://no-such-bucket/{name}")
    with pytest.raises(KvtoolsError, match="no such file, no such folder"):
        kvtools.open(f"{bucket.url}/not-there")


def test_one_file_is_read_where_listing_is_denied(bucket: Bucket, tmp_path: Path) -> None:
    write_tables([ArrayTable("emb", np.arange(5), np.ones((5, 2), np.float32))], tmp_path / "t.npz", "npz")
    url, other = (bucket.put(tmp_path / "t.npz", f"only/{name}.npz") for name in "tu")
    bucket.proxy.before = lambda request: refusal(403, "AccessDenied") if "list-type" in request.path else None
    assert kvtools.open(url).table("emb").rows == 5
    both = [local_path(one) for one in (url, other)]  # as a command does with its arguments
    assert [kvtools.open(path).table("emb").rows for path in both] == [5, 5]


def test_a_server_that_is_gone_is_told(bucket: Bucket, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(store, "_stores", {})
    with pytest.raises(BadInputError, match="cannot be reached"):
        kvtools.open(url)


def test_no_credentials_are_told(bucket: Bucket, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(store, "_stores", {})
    with pytest.raises(BadInputError, match="no credentials"):
        kvtools.open(url)


def test_rows_of_two_files_are_never_mixed(bucket: Bucket, url: str, tmp_path: Path) -> None:
    table = kvtools.open(url).table("emb")
    chunks = table.chunks(rows=500)
    np.testing.assert_array_equal(next(chunks).values, VALUES[:500])
    write_tables([ArrayTable("emb", np.arange(ROWS), VALUES + 1)], tmp_path / "n" / "model.ckpt", "tfplugin")
    bucket.put(tmp_path / "n", "m")
    rest: list[Any] = []
    try:
        rest += list(chunks)
    except KvtoolsError as error:
        assert "changed while it was read" in str(error)
    else:  # what had come before it was replaced
        np.testing.assert_array_equal(np.concatenate([chunk.values for chunk in rest]), VALUES[500:])
    np.testing.assert_array_equal(values(url), VALUES + 1)  # opened again, it is the new one
    with pytest.raises(KvtoolsError, match="replaced while it was read"):
        list(table.chunks())


def test_a_name_that_no_file_can_have_is_refused(bucket: Bucket) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key="d/" + "x" * 300, Body=b"x")
    with pytest.raises(BadInputError, match="no file here can be"):
        kvtools.open(f"{bucket.url}/d")
    bucket.client.put_object(Bucket=bucket.name, Key="e/../../../../etc/cron.d/x", Body=b"x")
    with pytest.raises(BadInputError, match="no file here can be"):
        kvtools.open(f"{bucket.url}/e")
    bucket.client.put_object(Bucket=bucket.name, Key="f/a", Body=b"x")
    bucket.client.put_object(Bucket=bucket.name, Key="f/a/b", Body=b"x")
    with pytest.raises(BadInputError, match="is a file and a folder"):
        kvtools.open(f"{bucket.url}/f")


def test_a_folder_with_too_many_files_is_refused(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtools.remote import listing

    system, place = memory
    monkeypatch.setattr(listing, "MOST", 10)
    for number in range(12):
        system.pipe_file(f"{place}/many/{number}", b"x")
    with pytest.raises(BadInputError, match="more than 10 files; name a folder below"):
        kvtools.open(f"{place}/many")


def test_a_disk_that_is_full_is_told(bucket: Bucket, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    opened = kvtools.open(url).table("emb")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(remote_file.os, "pwrite", full)
    with pytest.raises(BadInputError, match="make room, or name another folder by TMPDIR"):
        list(opened.chunks())


def test_a_disk_that_gives_no_room_back_is_told(bucket: Bucket, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes
    import errno

    monkeypatch.setattr(block_cache, "_limit", 1 << 20)

    def refuse(*_: Any) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(block_cache, "_fallocate", refuse)
    with pytest.raises(BadInputError, match="KVTOOLS_REMOTE_CACHE"):
        list(kvtools.open(url).table("emb").chunks())
