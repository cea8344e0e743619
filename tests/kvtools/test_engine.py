from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvtools
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.dialects.tfplugin import DIALECT
from kvtools.diff import compare_tables
from kvtools.engine import run_all, started
from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.migrate import write_tables


def square(number: int) -> int:
    return number * number


def refuse(number: int) -> int:
    if number == 3:
        raise BadInputError(f"working on {number}: it is three, expected another number; leave it out")
    return number


class TestThreads:
    @pytest.mark.parametrize("workers", [1, 2, 7, None])
    def test_results_come_in_order(self, workers: int | None) -> None:
        assert list(run_all(square, range(20), workers=workers)) == [n * n for n in range(20)]
        assert list(run_all(square, [], workers=workers)) == []

    @pytest.mark.parametrize("workers", [1, 2, 4])
    def test_the_error_of_a_task_arrives(self, workers: int) -> None:
        with pytest.raises(BadInputError, match="it is three"):
            list(run_all(refuse, range(6), workers=workers))

    def test_results_that_nobody_took_yet_are_bounded(self) -> None:
        begun: list[int] = []
        with contextlib.closing(run_all(begun.append, range(2000), workers=2)) as results:  # type: ignore[type-var]
            next(results)
        assert len(begun) < 600

    def test_a_thread_that_an_interrupt_came_upon_at_its_start_is_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, stop, ended = threading.Event(), threading.Event(), []
        start = threading.Thread.start

        def interrupted(thread: threading.Thread) -> None:
            start(thread)
            assert begun.wait(60)
            raise KeyboardInterrupt

        def task(number: int) -> None:
            begun.set()
            assert stop.wait(60)
            time.sleep(0.05)
            ended.append(number)

        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(run_all(task, range(9), workers=2, stop=stop))
        assert ended == [0]

    def test_a_task_that_looks_at_stop_is_not_waited_for(self) -> None:
        stop = threading.Event()

        def task(number: int) -> bool:
            if number == 0:
                raise BadInputError("at once")
            return stop.wait(60)

        began = time.monotonic()
        with pytest.raises(BadInputError, match="at once"):
            list(run_all(task, range(2), workers=2, stop=stop))
        assert time.monotonic() - began < 30 and stop.is_set()

    def test_usage(self) -> None:
        with pytest.raises(UsageError, match="got 0 workers"):
            list(run_all(square, [1], workers=0))
        with pytest.raises(UsageError, match="expected local or ray"):
            list(run_all(square, [1], engine="dask"))  # type: ignore[arg-type]


@pytest.fixture(scope="class")
def cluster() -> Iterator[None]:
    """A Ray cluster of two workers on this machine, of this process, as a program that uses Ray itself would have."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray = pytest.importorskip("ray")
    # Its workers would take this package's sources, which are not compiled, for the installed one if it began here;
    # elsewhere they find no module of tests.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.chdir("/")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            configure_logging=False,
        )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
class TestRay:
    def test_results_come_in_order(self) -> None:
        assert list(run_all(square, range(9), engine="ray", workers=2)) == [n * n for n in range(9)]
        assert list(run_all(square, range(3), engine="ray")) == [0, 1, 4]
        assert list(run_all(square, [], engine="ray")) == []

    def test_the_error_of_a_task_arrives_as_it_was_raised(self) -> None:
        with pytest.raises(BadInputError) as raised:
            list(run_all(refuse, range(6), engine="ray"))
        assert str(raised.value) == "working on 3: it is three, expected another number; leave it out"

    def test_a_cluster_that_was_there_stays(self) -> None:
        import ray

        with started("ray"):
            pass
        assert ray.is_initialized()

    @pytest.mark.parametrize("parts", [None, 2])
    def test_tables_are_written_as_by_threads(self, tmp_path: Path, sample_path: Path, parts: int | None) -> None:
        """ads/emb has three parts, user_emb bfloat16 rows, empty_emb no rows: readers are pickled with all of it."""
        checkpoint = open_checkpoint(sample_path)
        progress: list[tuple[str, int, int]] = []
        account = write_tables(
            checkpoint.select([]),
            tmp_path / "ray",
            "tfplugin",
            beside=checkpoint,
            parts=parts,
            engine="ray",
            verify=True,
            progress=lambda *step: progress.append(step),
        )
        local = write_tables(checkpoint.select([]), tmp_path / "local", "tfplugin", beside=checkpoint, parts=parts)
        assert [(t.name, t.rows_written, t.parts) for t in account.tables] == [
            (t.name, t.rows_written, t.parts) for t in local.tables
        ]
        one, two = open_checkpoint(tmp_path / "ray"), open_checkpoint(tmp_path / "local")
        assert all(compare_tables(one.table(name), two.table(name)).same for name in checkpoint.tables)
        assert one.variables == two.variables
        # A step for each shard.
        assert [step for step in progress if step[0] == "ads/emb"][-1] == ("ads/emb", 11, 11)
        assert len([step for step in progress if step[0] == "ads/emb"]) == 3

    def test_tables_of_arrays_are_sent_along(self, tmp_path: Path) -> None:
        table = arrays(3)
        write_tables([table], tmp_path / "out", "tfplugin", engine="ray", verify=True)

    def test_damage_that_a_worker_finds_is_one_line_and_nothing_is_written(
        self, tmp_path: Path, sample_path: Path
    ) -> None:
        data = sample_path / "model.ckpt-7.data-00000-of-00001"
        damaged = bytearray(data.read_bytes())
        damaged[700] ^= 1
        data.write_bytes(bytes(damaged))
        with pytest.raises(CorruptFileError, match="checksum mismatch"):
            write_tables(open_checkpoint(sample_path).select([]), tmp_path / "out", "tfplugin", engine="ray")
        assert [file.name for file in tmp_path.iterdir()] == ["sample"]

    def test_a_writer_of_one_process_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvtools.dialects.bundle_output import BundleTableWriter

        monkeypatch.setattr(BundleTableWriter, "distributable", False)
        with pytest.raises(UsageError, match=r"table 'emb' as tfplugin on ray: this dialect is written by one process"):
            write_tables([arrays(1)], tmp_path / "out", DIALECT, engine="ray")
        assert list(tmp_path.iterdir()) == []


def arrays(parts: int) -> TableReader:
    return kvtools.table_from_arrays("emb", np.arange(50), np.ones((50, 3), np.float32), parts=parts)


@pytest.mark.thorough
def test_a_cluster_is_started_where_there_is_none_and_stopped_again(tmp_path: Path, sample_path: Path) -> None:
    pytest.importorskip("ray")
    arguments = ["migrate", "sample", "out", "--to", "tfplugin", "--engine", "ray"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvtools.cli.main", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("wrote out (tfplugin)\n")


def test_a_cluster_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def fail(**options: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setenv("RAY_ADDRESS", "ray-head:6379")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    said = r"the cluster at 'ray-head:6379' \(RAY_ADDRESS\) did not answer: no route .* set RAY_AUTH_MODE=token"
    with (
        pytest.raises(BadInputError, match=said),
        started("ray"),
    ):
        pass
