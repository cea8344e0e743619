"""Writing to a store: what makes a checkpoint visible goes last, and what fails leaves nothing that opens."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_bucket import Bucket, contents
from s3_proxy import Answer, Request, refusal

import kvtools
from kvtools.array_table import ArrayTable
from kvtools.cli.main import main
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, KvtoolsError, OutputError
from kvtools.migrate import write_tables
from kvtools.remote import upload
from kvtools.remote.unfinished import UNFINISHED

FORCE = WriteOptions(force=True)


def table(value: float, rows: int = 400, parts: int = 2) -> ArrayTable:
    cut = (rows // parts,) * parts
    return ArrayTable("emb", np.arange(rows), np.full((rows, 4), value, np.float32), part_rows=cut)


def value_of(url: str) -> float:
    rows = kvtools.open(url).table("emb").to_numpy().values
    assert rows is not None and np.unique(rows).size == 1
    return float(rows[0, 0])


def puts(bucket: Bucket) -> list[str]:
    """Names in the order in which they were put, or copied."""
    return [one.path.partition("?")[0].split("/", 2)[2] for one in bucket.proxy.requests if one.method == "PUT"]


def test_the_index_goes_last(bucket: Bucket) -> None:
    write_tables([table(1)], f"{bucket.url}/a/model.ckpt", "tfplugin")
    assert puts(bucket) == ["a/model.ckpt.data-00000-of-00001", "a/model.ckpt.index"]
    assert value_of(f"{bucket.url}/a/model.ckpt") == 1
    write_tables([table(2)], f"{bucket.url}/a/model.ckpt", "tfplugin", options=FORCE)
    assert puts(bucket)[-1] == "a/model.ckpt.index" and len(bucket.names()) == 2
    assert value_of(f"{bucket.url}/a/model.ckpt") == 2


def test_a_folder_is_marked_as_unfinished_until_it_is_whole(bucket: Bucket) -> None:
    write_tables([table(1)], f"{bucket.url}/t", "parquet")
    names = puts(bucket)
    assert names[0] == f"t/{UNFINISHED}" and names[-1] == "t/.kvtools"
    assert sorted(bucket.names()) == ["t/.kvtools", "t/emb/part-00000.parquet", "t/emb/part-00001.parquet"]
    bucket.client.put_object(Bucket=bucket.name, Key=f"t/{UNFINISHED}", Body=b"")
    with pytest.raises(BadInputError, match="being written, or its writing was broken off"):
        kvtools.open(f"{bucket.url}/t")
    write_tables([table(2)], f"{bucket.url}/t", "parquet", options=FORCE)
    assert value_of(f"{bucket.url}/t") == 2


@pytest.mark.parametrize("to", ["tfplugin", "parquet", "npz"])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_upload_that_fails_leaves_nothing_that_opens(bucket: Bucket, to: str, failing: int) -> None:
    seen = 0

    def before(request: Request) -> Answer | None:
        nonlocal seen
        if request.method != "PUT":
            return None
        seen += 1
        return refusal(403, "AccessDenied") if seen == failing else None

    bucket.proxy.before = before
    suffix = ".npz" if to == "npz" else ""
    if (to == "npz" and failing > 1) or (to == "tfplugin" and failing > 2):
        pytest.skip("it is fewer files")
    with pytest.raises(OutputError, match="denies access"):
        write_tables([table(1)], f"{bucket.url}/x/out{suffix}", to)
    assert bucket.names() == []


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["tfplugin", "parquet"])
def test_force_lets_the_old_stand_until_the_new_one_does(
    bucket: Bucket, to: str, recwarn: pytest.WarningsRecorder
) -> None:
    url = f"{bucket.url}/run/out"
    write_tables([table(1, parts=4)], url, to)
    old = {name: bucket.get(name) for name in bucket.names()}
    with pytest.raises(OutputError, match="--force"):
        write_tables([table(2)], url, to)
    for failing in range(1, 20):
        bucket.proxy.reset()
        seen = 0

        def before(request: Request, failing: int = failing) -> Answer | None:
            nonlocal seen
            if request.method not in ("PUT", "DELETE", "POST"):
                return None
            seen += 1
            return refusal(403, "AccessDenied") if seen == failing else None

        bucket.proxy.before = before
        try:
            write_tables([table(2)], url, to, options=FORCE)
        except OutputError as error:
            told = str(error)
        else:
            break
        bucket.proxy.before = None
        now = {name: bucket.get(name) for name in bucket.names()}
        if "as it was" in told:
            assert {name: data for name, data in now.items() if name in old} == old
            assert value_of(url) == 1
        else:  # the new one stands whole where the message says
            assert "whole at '" in told
            assert value_of(told.partition("whole at '")[2].partition("'")[0] + "/out" * (to == "tfplugin")) == 2
        for name in now.keys() - old.keys():
            bucket.client.delete_object(Bucket=bucket.name, Key=name)
        for name, data in old.items():
            bucket.client.put_object(Bucket=bucket.name, Key=name, Body=data)
    assert value_of(url) == 2
    assert failing > 4
    # The last thing to fail was the removal of what went up first: that is a warning.
    assert len([name for name in bucket.names() if ".kvtools-" in name]) == 1
    assert "could not be removed at" in str(recwarn.pop().message)


def test_a_single_file_takes_the_place_of_another_at_once(bucket: Bucket) -> None:
    url = f"{bucket.url}/t.npz"
    write_tables([table(1)], url, "npz")
    bucket.proxy.reset()
    write_tables([table(2)], url, "npz", options=FORCE)
    assert puts(bucket) == ["t.npz"] and value_of(url) == 2


@pytest.mark.parametrize("listing", ["allowed", "denied"])
def test_a_single_file_that_is_not_taken_leaves_the_old_one(bucket: Bucket, listing: str) -> None:
    url = f"{bucket.url}/t.npz"
    write_tables([table(1)], url, "npz")

    def before(request: Request) -> Answer | None:
        denied = request.method == "PUT" or (listing == "denied" and "list-type" in request.path)
        return refusal(403, "AccessDenied") if denied else None

    bucket.proxy.before = before
    with pytest.raises(OutputError, match="denies access"):
        write_tables([table(2)], url, "npz", options=FORCE)
    bucket.proxy.before = lambda request: refusal(403, "AccessDenied") if "list-type" in request.path else None
    assert value_of(url) == 1
    write_tables([table(2)], url, "npz", options=FORCE)
    assert value_of(url) == 2


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (403, "AccessDenied")])
def test_a_listing_that_fails_is_not_taken_for_an_empty_folder(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    url = f"{bucket.url}/a/model.ckpt"
    write_tables([table(1)], url, "tfplugin")
    old = {name: bucket.get(name) for name in bucket.names()}
    real = upload.list_folder

    def before(request: Request) -> Answer | None:
        failing = "list-type" in request.path or (request.method == "PUT" and request.path.endswith(".index"))
        return refusal(status, code) if failing else None

    def listed(*arguments: Any) -> Any:
        bucket.proxy.before = before
        return real(*arguments)

    monkeypatch.setattr(upload, "list_folder", listed)
    with pytest.raises(OutputError, match="what is there is as it was"):
        write_tables([table(2)], url, "tfplugin", options=FORCE)
    bucket.proxy.before = None
    assert {name: bucket.get(name) for name in bucket.names()} == old


def test_what_a_store_did_not_take_whole_is_not_made_visible(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    real = upload._Upload._put

    def cut(self: Any, file: Path, path: tuple[str, ...], begun: list[tuple[str, ...]]) -> None:
        real(self, file, path, begun)
        if ".data-" in path[-1]:
            bucket.client.put_object(Bucket=bucket.name, Key="/".join(["a", *path]), Body=b"half")

    monkeypatch.setattr(upload._Upload, "_put", cut)
    with pytest.raises(OutputError, match="got 4 bytes of"):
        write_tables([table(1)], f"{bucket.url}/a/model.ckpt", "tfplugin")
    assert bucket.names() == []


def test_what_cannot_be_removed_again_is_said(bucket: Bucket) -> None:
    def before(request: Request) -> Answer | None:
        denied = request.method in ("DELETE", "POST") or request.path.endswith(".index")
        return refusal(403, "AccessDenied") if denied and request.method != "GET" else None

    bucket.proxy.before = before
    with pytest.raises(OutputError, match=r"model.ckpt.data-00000-of-00001'.* could not be removed again"):
        write_tables([table(1)], f"{bucket.url}/a/model.ckpt", "tfplugin")
    bucket.proxy.reset()
    with pytest.raises(KvtoolsError):
        kvtools.open(f"{bucket.url}/a/model.ckpt")


def test_a_large_file_goes_up_in_parts_that_are_gone_when_it_fails(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_PART_BYTES", 5 << 20)
    rows = 400_000
    big = ArrayTable("emb", np.arange(rows), np.random.default_rng(1).normal(size=(rows, 8)).astype(np.float32))
    stored = threading.Semaphore(0)

    def store(request: Request, answer: Answer) -> Answer:
        if "partNumber" in request.path:
            stored.release()
        return answer

    def refuse(request: Request) -> Answer | None:
        if "partNumber=2" not in request.path:
            return None
        for _ in range(3):  # S3 itself may keep a part that is under way when its upload is given up
            assert stored.acquire(timeout=60)
        return refusal(403, "AccessDenied")

    bucket.proxy.before, bucket.proxy.fault = refuse, store
    with pytest.raises(OutputError, match="denies access"):
        write_tables([big], f"{bucket.url}/m.ckpt", "tfplugin")
    assert any("partNumber=4" in one.path for one in bucket.proxy.requests)
    assert bucket.names() == []
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")
    bucket.proxy.reset()
    write_tables([big], f"{bucket.url}/m.ckpt", "tfplugin")
    assert any("partNumber=3" in one.path for one in bucket.proxy.requests)
    assert contents(kvtools.open(f"{bucket.url}/m.ckpt"))["emb"]["rows"]["values"] == big.to_numpy().values.tobytes()


def test_an_interrupt_leaves_no_part_of_a_single_file(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_PART_BYTES", 5 << 20)
    big = ArrayTable("emb", np.arange(400_000), np.ones((400_000, 8), np.float32))

    def interrupt(request: Request) -> None:
        if "partNumber=2" in request.path:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    bucket.proxy.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        write_tables([big], f"{bucket.url}/m.npz", "npz")
    assert bucket.names() == []
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")


def test_a_busy_store_is_tried_again(bucket: Bucket) -> None:
    bucket.proxy.before = lambda request: refusal(503, "SlowDown") if request.number == 1 else None
    write_tables([table(1)], f"{bucket.url}/a/model.ckpt", "tfplugin")
    assert value_of(f"{bucket.url}/a/model.ckpt") == 1


def test_what_is_no_checkpoint_of_ours_is_not_replaced(memory: Any) -> None:
    system, place = memory
    system.pipe_file(f"{place}/home/letter.txt", b"dear")
    with pytest.raises(OutputError, match="--force does not replace it"):
        write_tables([table(1)], f"{place}/home", "parquet", options=FORCE)
    assert system.cat_file(f"{place}/home/letter.txt") == b"dear"
    with pytest.raises(OutputError, match="it is a folder"):
        write_tables([table(1)], f"{place}/home", "npz", options=FORCE)


def test_a_source_is_not_replaced_by_its_export(memory: Any) -> None:
    from kvtools.export import export_saved_model

    _, place = memory
    write_tables([table(1)], f"{place}/m.ckpt", "tfplugin")
    with pytest.raises(OutputError, match="what is exported itself"):
        export_saved_model(kvtools.open(f"{place}/m.ckpt"), f"{place}/m.ckpt", force=True)
    export_saved_model(kvtools.open(f"{place}/m.ckpt"), f"{place}/served")
    assert value_of(f"{place}/served") == 1


def test_rows_as_lines_of_text_and_never_over_what_they_are_of(
    bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"{bucket.url}/in.npz"
    write_tables([table(1)], source, "npz")
    assert main(["get", source, "3", "--output", f"{bucket.url}/rows.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == f"{bucket.url}/rows.csv"
    key = bucket.client.get_object(Bucket=bucket.name, Key="rows.csv")["Body"].read()
    assert key == b"key,value.0,value.1,value.2,value.3\n3,1.0,1.0,1.0,1.0\n"
    assert main(["get", source, "3", "--output", source, "--force"]) == 1
    assert f"writing '{source}': that is what is read" in capsys.readouterr().err
    assert value_of(source) == 1
