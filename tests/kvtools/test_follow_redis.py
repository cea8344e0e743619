"""A Redis that follows a chain has what the chain has, after every increment, and after a run that was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chain_writer import ChainWriter, without
from redis_processes import Cluster, Server, redis, wait_until

from kvtools.chain import ChainError
from kvtools.cli.main import main
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.redis_server import WRITE
from kvtools.errors import BadInputError, OutputError
from kvtools.follow_redis import Applied, RedisFollower


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.process.kill()


@pytest.fixture
def url(server: Server) -> str:
    server.client().flushall()
    return f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
def writer(tmp_path: Path) -> ChainWriter:
    writer = ChainWriter(tmp_path / "run", {"emb": 3, "also": 2}, parts=2)
    writer.put("emb", range(200), 1)
    writer.put("also", range(50), 1)
    writer.full()
    return writer


def steps(follower: RedisFollower) -> list[Applied]:
    found = []
    while (applied := follower.step()) is not None:
        found.append(applied)
    return found


def assert_has(url: str, writer: ChainWriter) -> None:
    checkpoint = open_checkpoint(url)
    for name, table in checkpoint.tables.items():
        chunk = table.to_numpy()
        assert chunk.values is not None and sorted(chunk.keys.tolist()) == sorted(writer.rows[name])
        expected, there = writer.expected(name, chunk.keys)
        assert there.all() and chunk.values.tobytes() == expected.tobytes()
        assert table.schema.rows == len(writer.rows[name]) and not table.schema.slots


def test_rows_come_and_go_with_each_increment(url: str, writer: ChainWriter) -> None:
    follower = RedisFollower(writer.folder, url)
    assert [one.name for one in steps(follower)] == ["ckpt-1"]
    assert_has(url, writer)
    rng = np.random.default_rng(1)
    for number in range(6):
        writer.put("emb", rng.integers(0, 300, 40).tolist(), number + 10)
        writer.remove("emb", rng.integers(0, 300, 20).tolist())
        writer.put("also", [number], number)
        writer.increment()
        assert [one.name for one in steps(follower)] == [f"ckpt-{number + 2}.delta"]
        assert_has(url, writer)
    writer.put("emb", [5], 7)
    writer.full()
    assert [one.name for one in steps(follower)] == ["ckpt-8"]
    assert_has(url, writer)
    follower.close()


def test_another_run_goes_on_from_where_the_last_one_came_to(url: str, writer: ChainWriter) -> None:
    first = RedisFollower(writer.folder, url)
    writer.put("emb", [1, 500], 2)
    writer.increment()
    assert len(steps(first)) == 2
    first.close()
    writer.remove("emb", [500, 501])
    writer.increment()
    again = RedisFollower(writer.folder, url)
    assert [one.name for one in steps(again)] == ["ckpt-3.delta"]
    assert_has(url, writer)


def test_rows_that_redis_has_evicted_are_not_written_over(url: str, writer: ChainWriter, server: Server) -> None:
    follower = RedisFollower(writer.folder, url)
    steps(follower)
    bucket = f"{{{json.loads(server.client().get('kvtools:meta'))['tables'][1]['key']}:0}}"
    assert server.client().delete(bucket) == 1
    writer.put("emb", [1, 500], 2)
    writer.increment()
    for _ in range(2):
        with pytest.raises(OutputError, match="table 'emb' has 0 of 200 rows: Redis has evicted keys, see its maxmem"):
            follower.step()
    assert not server.client().exists(bucket), "where a lookup would miss all other rows without a word"
    follower.close()
    with pytest.raises(OutputError, match=r"table 'emb' has 0 of 200 rows: .* write the tables anew, by --force"):
        RedisFollower(writer.folder, url)
    assert len(steps(RedisFollower(writer.folder, url, force=True))) == 2
    assert_has(url, writer)


def test_a_redis_that_begins_again_without_its_data_is_filled_anew(
    url: str, writer: ChainWriter, server: Server
) -> None:
    follower = RedisFollower(writer.folder, url)
    steps(follower)
    server.client().flushall()
    writer.put("emb", [1, 500], 2)
    writer.increment()
    assert [one.name for one in steps(follower)] == ["ckpt-1", "ckpt-2.delta"]
    assert_has(url, writer)


@pytest.mark.parametrize("when", ["before an increment", "in the middle of one"])
def test_a_redis_that_begins_again_with_its_data_has_no_scripts(
    url: str, writer: ChainWriter, server: Server, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = RedisFollower(writer.folder, url)
    steps(follower)
    table = open_checkpoint(url).tables["emb"]
    writer.put("emb", [1, 500], 2)
    writer.remove("emb", [3])
    writer.increment()
    if when == "before an increment":
        server.client().script_flush()
    else:
        forget_scripts(follower, [server.client()], monkeypatch)
    assert [one.name for one in steps(follower)] == ["ckpt-2.delta"]
    assert_has(url, writer)
    server.client().script_flush()
    assert len(table.take(np.arange(3))) == 3


def forget_scripts(follower: RedisFollower, servers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Redis forget scripts when an increment is about to be written."""
    count = follower._there

    def counted(*arguments: Any) -> int:
        found = count(*arguments)
        for server in servers:
            server.script_flush()
        return found

    monkeypatch.setattr(follower, "_there", counted)


def test_a_table_that_was_emptied_is_filled_again(url: str, writer: ChainWriter) -> None:
    follower = RedisFollower(writer.folder, url)
    writer.remove("emb", range(200))
    writer.increment()
    assert len(steps(follower)) == 2
    assert_has(url, writer)
    writer.put("emb", [1, 500], 2)
    writer.increment()
    assert len(steps(RedisFollower(writer.folder, url))) == 1
    assert_has(url, writer)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_a_cluster_follows_goes_on_and_does_again_what_was_cut_short(
    cluster: Cluster, scheme: str, writer: ChainWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.clear()
    url = f"{scheme}://127.0.0.1:{cluster.ports[1]}/0"
    follower = RedisFollower(writer.folder, url)
    assert [one.name for one in steps(follower)] == ["ckpt-1"]
    for number in range(3):
        writer.put("emb", range(150 + 40 * number, 220 + 40 * number), number + 5)
        writer.remove("emb", range(10 * number, 10 * number + 8))
        writer.increment()
        assert [one.name for one in steps(follower)] == [f"ckpt-{number + 2}.delta"]
        assert_has(url, writer)
    # A run that ends with the rows written, and not what says so.
    writer.put("also", range(40, 60), 9)
    writer.remove("emb", [200, 201])
    writer.increment()
    make = follower._client.pipeline

    def cut_short(**options: Any) -> Any:
        pipeline = make(**options)
        queue, run, left_out = pipeline.execute_command, pipeline.execute, []

        def execute_command(*command: Any) -> Any:
            return left_out.append(command) if command[:2] == ("SET", follower._key) else queue(*command)

        def execute(**how: Any) -> Any:
            found = run(**how)
            if left_out:
                raise KeyboardInterrupt
            return found

        pipeline.execute_command, pipeline.execute = execute_command, execute
        return pipeline

    with monkeypatch.context() as cut:
        cut.setattr(follower._client, "pipeline", cut_short)
        with pytest.raises(KeyboardInterrupt):
            follower.step()
    assert len(open_checkpoint(url).tables["also"].to_numpy().keys) == 60
    follower.close()
    again = RedisFollower(writer.folder, url)
    assert [one.name for one in steps(again)] == ["ckpt-5.delta"]
    assert_has(url, writer)
    again.close()


def test_nodes_of_a_cluster_that_begin_again_get_what_they_miss(
    cluster: Cluster, writer: ChainWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.clear()
    url = f"redis+cluster://127.0.0.1:{cluster.ports[0]}/0"
    follower = RedisFollower(writer.folder, url)
    steps(follower)
    with monkeypatch.context() as patch:
        forget_scripts(follower, [redis.Redis(port=port) for port in cluster.ports], patch)
        writer.put("emb", range(150, 260), 5)
        writer.put("also", range(40, 60), 9)
        writer.increment()
        assert [one.name for one in steps(follower)] == ["ckpt-2.delta"]
        assert_has(url, writer)
    # Some of an increment is refused: the rest is there, and the same run does all of it again.
    writer.put("emb", range(250, 400), 6)
    writer.put("also", range(50, 90), 7)
    writer.increment()
    send = follower._do

    def refused(commands: list[tuple[Any, ...]]) -> list[Any]:
        if commands and commands[0][:2] == ("EVALSHA", WRITE):
            return send([*commands[:-1], ("NO-SUCH-COMMAND", *commands[-1][3:4])])
        return send(commands)

    with monkeypatch.context() as patch:
        patch.setattr(follower, "_do", refused)
        with pytest.raises(OutputError):
            follower.step()
    assert [one.name for one in steps(follower)] == ["ckpt-3.delta"]
    assert_has(url, writer)
    follower.close()


def test_a_gap_is_refused_and_a_full_heals_it(url: str, writer: ChainWriter) -> None:
    told: list[ChainError] = []
    follower = RedisFollower(writer.folder, url, on_refused=told.append)
    steps(follower)
    before = {key: row.copy() for key, row in writer.rows["emb"].items()}
    writer.put("emb", [1], 2)
    lost = writer.increment()
    writer.put("emb", [2], 2)
    writer.increment()
    without(lost)
    assert steps(follower) == [] and [error.reason for error in told] == ["gap"]
    late, writer.rows["emb"] = writer.rows["emb"], before
    assert_has(url, writer)
    writer.rows["emb"] = late
    writer.full()
    assert [one.name for one in steps(follower)] == ["ckpt-4"]
    assert_has(url, writer)


def test_another_table_s_increment_changes_nothing(url: str, writer: ChainWriter) -> None:
    told: list[ChainError] = []
    follower = RedisFollower(writer.folder, url, on_refused=told.append)
    steps(follower)
    writer.dims["also"] = 5
    writer.put("emb", [1], 9)
    writer.put("also", [1], 9)
    writer.increment()
    assert steps(follower) == [] and [error.reason for error in told] == ["other-table"]
    found = open_checkpoint(url).table("emb").to_numpy()
    assert found.values is not None and found.values[found.keys == 1, 0].tolist() == [np.float32(1 + 1 / 7)]


def test_tables_of_somebody_else_are_left_alone(url: str, writer: ChainWriter, server: Server) -> None:
    steps(RedisFollower(writer.folder, url))
    server.client().delete("kvtools:follow")
    with pytest.raises(OutputError, match=r"no chain was followed with.*--force"):
        RedisFollower(writer.folder, url)
    follower = RedisFollower(writer.folder, url, force=True)
    assert [one.name for one in steps(follower)] == ["ckpt-1"]
    # And two that follow to one place: the second notices.
    other = RedisFollower(writer.folder, url)
    writer.put("emb", [3], 3)
    writer.increment()
    assert len(steps(other)) == 1
    with pytest.raises(OutputError, match="something else has written"):
        follower.step()
    assert_has(url, writer)
    with pytest.raises(BadInputError, match="connecting"):
        RedisFollower(writer.folder, "redis://127.0.0.1:1/0")


def test_another_run_is_gone_over_to_once_and_force_begins_anew(
    url: str, writer: ChainWriter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer.put("emb", [1], 2)
    writer.increment()
    writer.full(beside=True)
    command = ["follow", str(writer.folder), "--to", url, "--once"]
    assert main(command) == 0 and capsys.readouterr().out.startswith("ckpt-2: ")
    other = ChainWriter(tmp_path / "other", {"emb": 3, "also": 2})
    other.put("emb", range(7), 5)
    other.put("also", range(3), 5)
    other.full()
    for key in (1, 2):
        other.put("emb", [key], 6)
        other.increment()
    shutil.copytree(other.folder, writer.folder, dirs_exist_ok=True)  # the run before's ckpt-2 is left
    assert main(command) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "ckpt-1",
        "ckpt-2.delta",
        "ckpt-3.delta",
    ]
    assert_has(url, other)
    without(writer.folder / "ckpt-2")
    assert main(command) == 0 and not capsys.readouterr().out
    assert main([*command, "--force"]) == 0 and len(capsys.readouterr().out.splitlines()) == 3
    assert_has(url, other)
    assert main(["follow", str(writer.folder / "ckpt-1"), "--to", url]) == 2
    assert "that is one member of a chain; name its folder" in capsys.readouterr().err


def test_a_full_that_was_cut_short_is_written_again(url: str, writer: ChainWriter, server: Server) -> None:
    steps(RedisFollower(writer.folder, url))
    server.client().set("kvtools:follow", json.dumps({"sequence": None}))
    again = RedisFollower(writer.folder, url)
    assert [one.name for one in steps(again)] == ["ckpt-1"]
    assert_has(url, writer)


@pytest.mark.thorough
def test_the_command_is_killed_again_and_again_and_ends_with_what_the_chain_has(
    url: str, writer: ChainWriter, server: Server
) -> None:
    command = [sys.executable, "-m", "kvtools.cli.main", "follow", str(writer.folder), "--to", url, "--poll", "0.01"]
    rng = np.random.default_rng(2)
    for _ in range(6):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=writer.folder)
        for _ in range(4):
            writer.put("emb", rng.integers(0, 2000, 300).tolist(), writer.number)
            writer.remove("emb", rng.integers(0, 2000, 100).tolist())
            writer.increment()
        assert process.stdout is not None and process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=writer.folder)

    def caught_up() -> Any:
        return json.loads(server.client().get("kvtools:follow"))["sequence"] == writer.number

    wait_until(caught_up, "the last increment is applied")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == "kvtools: ended\n" and process.returncode == 0
    assert_has(url, writer)
