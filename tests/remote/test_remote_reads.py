"""Checkpoints in a store give the same rows as on this machine, whatever the dialect; and by how many requests."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chain_writer import ChainWriter
from round_trip import table as sample_table
from s3_bucket import Bucket, contents

import kvtools
from kvtools.array_table import ArrayTable
from kvtools.cli.main import main
from kvtools.dialects.detect import writable_dialects
from kvtools.migrate import write_tables
from kvtools.remote import block_cache
from kvtools.snapshot import Snapshot

DATA = Path(__file__).parent.parent / "data"

#: What lies in tests/data: the folder to put there, and the path in it to open.
PLACES = {
    "tfplugin-folder": ("sample", ""),
    "tfplugin-prefix": ("sample", "/model.ckpt-7"),
    "tfplugin-index": ("sample", "/model.ckpt-7.index"),
    "deeprec": ("deeprec", "/model.ckpt-1200"),
    "tfplus": ("tfplus", ""),
    "tfra-v1": ("tfra/v1_adam", ""),
    "tfra-files": ("tfra/filesystem", "/ckpt"),
    "tfra-object": ("tfra/object", "/ckpt"),
    "tfra-savedmodel": ("tfra/savedmodel", ""),
    "sok": ("sok", ""),
    "sok-file": ("sok", "/emb_0-key"),
    "snapshot": ("formats", "/int8_with_scale.kvsnap"),
    "arrow-file": ("formats", "/sample.arrow"),
    "arrow-folder": ("formats", "/sample_arrow"),
    "arrow-part": ("formats", "/sample_arrow/ads%2Femb/part-00000.arrow"),
    "hdf5": ("formats", "/sample.h5"),
    "parquet-file": ("formats", "/sample.parquet"),
    "parquet-folder": ("formats", "/sample_parquet"),
}


def opened(path: str | Path) -> Any:
    try:
        return contents(kvtools.open(path))
    except kvtools.errors.KvtoolsError as error:  # type: ignore[attr-defined]
        return type(error)


@pytest.mark.parametrize("store", ["memory", "s3"])
@pytest.mark.parametrize("place", PLACES)
def test_the_same_rows_from_a_store(request: pytest.FixtureRequest, store: str, place: str) -> None:
    folder, path = PLACES[place]
    if store == "s3":
        url = request.getfixturevalue("bucket").put(DATA / folder, f"models/{Path(folder).name}")
    else:
        system, url = request.getfixturevalue("memory")
        url = f"{url}/{Path(folder).name}"
        system.put(f"{DATA / folder}/", f"{url}/", recursive=True)
    assert opened(url + path) == opened(str(DATA / folder) + path)


@pytest.mark.parametrize("to", sorted({*writable_dialects()} - {"redis", "tfra_redis"}))
def test_what_is_written_to_a_store_is_read_back_to_the_bit(memory: Any, tmp_path: Path, to: str) -> None:
    _, place = memory
    suffix = {"hdf5": ".h5", "npz": ".npz", "safetensors": ".safetensors", "snapshot": ".kvsnap"}.get(to, "")
    key_dtype = "int64"
    rng = np.random.default_rng(5)
    keys = rng.permutation(700).astype(key_dtype)
    values = rng.normal(size=(700, 4)).astype(np.float32)
    table = ArrayTable("emb", keys, values, slots={"m": values * 2}, part_rows=(300, 400), partition="floor_mod")
    account = write_tables([table], f"{place}/a/out{suffix}", to)
    assert account.output == f"{place}/a/out{suffix}"
    write_tables([table], tmp_path / f"out{suffix}", to)
    remote, local = kvtools.open(f"{place}/a/out{suffix}"), kvtools.open(tmp_path / f"out{suffix}")
    assert contents(remote) == contents(local)


@pytest.mark.parametrize("name", ["compressed.npz", "plain.npz", "chunked.h5"])
def test_compressed_files_are_read_by_ranges(memory: Any, tmp_path: Path, name: str) -> None:
    system, place = memory
    table = sample_table(rows=300)
    compression = {"compressed.npz": "deflate", "plain.npz": None, "chunked.h5": "gzip"}[name]
    from kvtools.dialects.writing import WriteOptions

    to = "npz" if name.endswith("npz") else "hdf5"
    write_tables([table], tmp_path / name, to, options=WriteOptions(compression=compression))
    system.put_file(str(tmp_path / name), f"{place}/{name}")
    assert contents(kvtools.open(f"{place}/{name}")) == contents(kvtools.open(tmp_path / name))


def test_a_chain_is_folded_and_one_of_several_is_named(memory: Any, tmp_path: Path) -> None:
    system, place = memory
    chain = ChainWriter(tmp_path / "train", {"emb": 3})
    chain.put("emb", range(40), 1.0)
    chain.full()
    chain.put("emb", range(30, 60), 2.0)
    chain.remove("emb", [3, 4])
    chain.increment()
    system.put(str(tmp_path / "train"), f"{place}/train", recursive=True)
    expected = contents(kvtools.open(tmp_path / "train"))
    assert contents(kvtools.open(f"{place}/train")) == expected
    assert contents(kvtools.open(f"{place}/train/")) == expected


def test_inspect_reads_the_index_alone(bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = 40_000
    values = np.random.default_rng(1).normal(size=(rows, 16)).astype(np.float32)
    table = ArrayTable("emb", np.arange(rows), values, part_rows=(rows // 2, rows // 2))
    for to, name in (("tfplugin", "model.ckpt"), ("parquet", "t.parquet"), ("snapshot", "t.kvsnap"), ("npz", "t.npz")):
        write_tables([table], tmp_path / to / name, to)
        url = bucket.put(tmp_path / to, to)
        assert main(["inspect", f"{url}/{name}", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["path"] == f"{url}/{name}"
        assert [one["rows"] for one in told["tables"]] == [rows]
        read = sum(one.answered for one in bucket.proxy.gets())
        size = sum(file.stat().st_size for file in (tmp_path / to).iterdir())
        assert read < min(size / 4, 12 * block_cache.BLOCK), (to, read)
        assert len(bucket.proxy.requests) <= 12, [one.path for one in bucket.proxy.requests]
    gets = [one.path for one in bucket.proxy.gets()]
    assert gets
    bucket.put(tmp_path / "tfplugin", "again")  # what was read before is not asked for again
    assert main(["inspect", f"{bucket.url}/again/model.ckpt"]) == 0
    assert {path.rpartition("/")[2].partition("?")[0] for path in (one.path for one in bucket.proxy.gets())} == {
        "model.ckpt.index",
        "model.ckpt.data-00000-of-00001",  # the description of the table, a string tensor
    }


def test_rows_are_read_once_and_in_large_ranges(bucket: Bucket, tmp_path: Path) -> None:
    rows = 200_000
    keys, values = np.arange(rows), np.random.default_rng(1).normal(size=(rows, 16)).astype(np.float32)
    write_tables([ArrayTable("emb", keys, values)], tmp_path / "m" / "model.ckpt", "tfplugin")
    url = bucket.put(tmp_path / "m", "m")
    table = kvtools.open(f"{url}/model.ckpt").table("emb")
    read = np.concatenate([chunk.values for chunk in table.chunks()])
    np.testing.assert_array_equal(read, values)
    size = sum(file.stat().st_size for file in (tmp_path / "m").iterdir())
    gets = bucket.proxy.gets()
    assert size <= sum(one.answered for one in gets) < size * 1.1
    assert len(gets) < 12
    bucket.proxy.reset()
    np.testing.assert_array_equal(table.take(np.array([5, 199_999, 70])).values, values[[5, 199_999, 70]])
    assert not bucket.proxy.gets()  # it lies here by now


def test_single_rows_of_a_large_table_are_single_ranges(bucket: Bucket, tmp_path: Path) -> None:
    rows = 100_000
    values = np.random.default_rng(1).normal(size=(rows, 32)).astype(np.float32)
    for to, name in (("tfplugin", "model.ckpt"), ("safetensors", "t.safetensors"), ("hdf5", "t.h5")):
        write_tables([ArrayTable("emb", np.arange(rows), values)], tmp_path / to / name, to)
        url = bucket.put(tmp_path / to, f"single/{to}")
        table = kvtools.open(f"{url}/{name}").table("emb")
        bucket.proxy.reset()
        numbers = np.array([99_999, 0, 50_000, 50_001])
        np.testing.assert_array_equal(table.take(numbers).values, values[numbers])
        assert sum(one.answered for one in bucket.proxy.gets()) <= 8 * block_cache.BLOCK
        assert len(bucket.proxy.gets()) <= 8


def test_the_cache_on_disk_is_bounded(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "_limit", 1 << 20)
    rows = 120_000
    values = np.random.default_rng(1).normal(size=(rows, 16)).astype(np.float32)
    write_tables([ArrayTable("emb", np.arange(rows), values)], tmp_path / "m" / "model.ckpt", "tfplugin")
    url = bucket.put(tmp_path / "m", "bounded")
    table = kvtools.open(f"{url}/model.ckpt").table("emb")
    from kvtools.remote import mirror

    for _ in range(2):  # what was given back is fetched again
        read = np.concatenate([chunk.values for chunk in table.chunks()])
        np.testing.assert_array_equal(read, values)
        assert block_cache.held_bytes() <= 1 << 20
        here = mirror.root() / "s3" / bucket.name / "bounded" / "model.ckpt.data-00000-of-00001"
        assert here.stat().st_size > 7 << 20
        assert here.stat().st_blocks * 512 <= 2 << 20
    numbers = np.random.default_rng(2).permutation(rows)
    np.testing.assert_array_equal(table.take(numbers).values, values[numbers])


def test_rows_are_found_again_in_another_process(memory: Any, tmp_path: Path) -> None:
    _, place = memory
    write_tables([ArrayTable("emb", np.arange(9), np.ones((9, 2), np.float32))], f"{place}/m.ckpt", "tfplugin")
    table = kvtools.open(f"{place}/m.ckpt").table("emb")
    assert table.origin is not None and table.origin.path == f"{place}/m.ckpt"
    assert pickle.loads(pickle.dumps(table)).all_keys().tolist() == [*range(9)]


def test_snapshots_are_looked_up_and_commands_go_from_store_to_store(
    memory: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _, place = memory
    values = np.arange(60, dtype=np.float32).reshape(30, 2)
    write_tables([ArrayTable("emb", np.arange(30), values)], f"{place}/in.ckpt", "tfplugin")
    assert main(["export", "--snapshot", f"{place}/out.kvsnap", f"{place}/in.ckpt"]) == 0
    assert f"wrote {place}/out.kvsnap" in capsys.readouterr().out
    found, there = Snapshot(f"{place}/out.kvsnap").table("emb").lookup(np.array([7, 99]))
    assert found[0].tolist() == values[7].tolist() and there.tolist() == [True, False]
    for command in (
        ["verify", f"{place}/out.kvsnap"],
        ["stats", f"{place}/in.ckpt", "--json"],
        ["diff", f"{place}/in.ckpt", f"{place}/out.kvsnap"],
        ["get", f"{place}/in.ckpt", "7"],
        ["migrate", f"{place}/in.ckpt", f"{place}/deep/er/t.parquet", "--verify"],
        ["clip", f"{place}/in.ckpt", f"{place}/clipped.ckpt", "--l2", "3"],
        ["split", f"{place}/in.ckpt", f"{place}/pieces/{{}}.npz", "--by", "table"],
        ["report", f"{place}/in.ckpt", f"--html={place}/page.html"],
    ):
        status = main(command)
        told = capsys.readouterr()
        assert status == 0, (command, told.err)
        assert "kvtools-remote" not in told.out + told.err, command


def test_the_latest_is_the_one_that_the_checkpoint_file_names(memory: Any) -> None:
    system, place = memory
    for number in (3, 9):
        rows = np.full((4, 2), number, np.float32)
        write_tables([ArrayTable("emb", np.arange(4), rows)], f"{place}/run/model-{number}", "tfplugin")
    system.pipe_file(f"{place}/run/checkpoint", b'model_checkpoint_path: "/long/gone/model-3"\n')
    assert kvtools.open(f"{place}/run").table("emb").take(np.array([0])).values.tolist() == [[3, 3]]


def test_a_file_url_is_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables([ArrayTable("emb", np.arange(4), np.ones((4, 2), np.float32))], f"file://{tmp_path}/m", "tfplugin")
    assert (tmp_path / "m.index").exists()
    assert kvtools.open(f"file://{tmp_path}/m").table("emb").rows == 4


def test_a_web_server_gives_files_and_listed_folders(tmp_path: Path) -> None:
    import functools
    import http.server
    import threading

    write_tables([ArrayTable("emb", np.arange(4), np.ones((4, 2), np.float32))], tmp_path / "d" / "m.ckpt", "tfplugin")
    write_tables([ArrayTable("emb", np.arange(4), np.ones((4, 2), np.float32))], tmp_path / "t.npz", "npz")
    write_tables([ArrayTable("emb", np.arange(2), np.ones((2, 2), np.float32))], tmp_path / "u.npz", "npz")
    (tmp_path / "d" / "link").symlink_to("gone")  # the page of the folder has it

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def send_head(self) -> Any:
            return self.send_error(403) if "denied" in self.path else super().send_head()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        for path in ("t.npz", "d/m.ckpt", "d/", "d/m.ckpt.index"):
            assert kvtools.open(f"{url}/{path}").table("emb").all_keys().tolist() == [0, 1, 2, 3], path
        two = [kvtools.open(f"{url}/{name}.npz").table("emb") for name in ("t", "u")]
        assert [len(table.all_keys()) for table in two] == [4, 2]
        with pytest.raises(kvtools.errors.BadInputError, match="403: the store denies"):  # type: ignore[attr-defined]
            kvtools.open(f"{url}/denied.npz")
        with pytest.raises(kvtools.errors.BadInputError, match="no/such"):  # type: ignore[attr-defined]
            kvtools.open(f"{url}/no/such")
        with pytest.raises(kvtools.errors.OutputError, match="for reading"):  # type: ignore[attr-defined]
            write_tables([sample_table()], f"{url}/new.npz", "npz")
    finally:
        server.shutdown()
        server.server_close()
