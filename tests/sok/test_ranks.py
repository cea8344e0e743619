"""The harness itself: ranks that fail, hang, die or disagree are reported, and the other tests still run."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest
from ranks import RanksReport, launch_on_ranks, run_on_ranks

pytest.importorskip("horovod", reason="Horovod is not installed: run `make setup-horovod`")


def _run(folder: Path, source: str, *, ranks: int = 2, timeout: float = 60, grace: float = 3) -> RanksReport:
    file = folder / "check_sample.py"
    file.write_text("import os, signal, threading, time\n" + textwrap.dedent(source))
    return run_on_ranks(ranks, [file], folder / "ranks", timeout=timeout, grace=grace)


def _outcomes(report: RanksReport) -> dict[str, list[str | None]]:
    return {test.split("::")[-1]: outcomes for test, outcomes in report.outcomes.items()}


@pytest.mark.thorough
def test_failure_on_one_rank_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    report = _run(
        tmp_path,
        """
        def test_first(rank):
            print("seen by the reader")
            assert rank != 1, "rank one is wrong"

        def test_not_met(rank, gather):
            assert rank != 2, "two stops"
            gather(rank)

        def test_last(rank, size, gather):
            assert gather(rank) == list(range(size))
        """,
        ranks=3,
        grace=60,
    )
    assert _outcomes(report) == {
        "test_first": ["passed", "failed", "passed"],
        "test_not_met": ["failed", "failed", "failed"],
        "test_last": ["passed", "passed", "passed"],
    }
    text = report.failures()
    assert "rank one is wrong" in text and "seen by the reader" in text and "--- rank 1 ---" in text
    assert "rank 2 ended this test before it came to this gather" in text
    assert "test_last" not in text
    assert not report.broken


@pytest.mark.thorough
def test_hang_ends_by_the_timeout_with_the_stacks_of_each_rank(tmp_path: Path) -> None:
    report = _run(
        tmp_path,
        """
        def sleeping():
            time.sleep(1000)

        def waiting():
            threading.Event().wait()

        def test_hang(rank):
            sleeping() if rank else waiting()

        def test_last():
            pass
        """,
        timeout=3,
    )
    assert _outcomes(report) == {"test_hang": [None, None], "test_last": ["passed", "passed"]}
    text = report.failures()
    assert "no rank got anywhere for 3 s" in text
    assert "in sleeping" in text and "in waiting" in text


@pytest.mark.thorough
def test_rank_that_dies_is_reported(tmp_path: Path) -> None:
    report = _run(
        tmp_path,
        """
        def test_dies(rank, gather):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            gather(rank)

        def test_last():
            pass
        """,
    )
    assert _outcomes(report) == {"test_dies": [None, None], "test_last": ["passed", "passed"]}
    assert "a rank ended in the middle" in report.failures()
    assert "Segmentation fault" in report.failures() and "in test_dies" in report.failures()


@pytest.mark.thorough
def test_ranks_that_collect_different_tests_are_refused(tmp_path: Path) -> None:
    report = _run(
        tmp_path,
        """
        if os.environ["HOROVOD_RANK"] == "0":
            def test_of_rank_0(): pass

        def test_both(): pass
        """,
    )
    assert "ranks 0 and 1 collected different tests" in report.failures()
    assert "test_of_rank_0" in report.failures()


@pytest.mark.thorough
def test_file_that_does_not_import_on_one_rank_is_reported(tmp_path: Path) -> None:
    report = _run(tmp_path, "if os.environ['HOROVOD_RANK'] == '1': raise ValueError('bad import')\ndef test_a(): pass")
    assert "bad import" in report.failures() and "--- rank 1 ---" in report.failures()


@pytest.mark.thorough
def test_rank_that_fails_while_another_waits_in_an_exchange(tmp_path: Path) -> None:
    report = _run(
        tmp_path,
        """
        import tensorflow as tf

        def test_left_alone(hvd, rank):
            assert rank == 0, "rank one leaves"
            hvd.alltoall(tf.ones([2]), splits=tf.constant([1, 1]))

        def test_exchange_of_the_next_launch(hvd, rank):
            assert hvd.allgather_object(rank) == [0, 1]
        """,
        timeout=120,
    )
    assert _outcomes(report) == {
        "test_left_alone": [None, "failed"],
        "test_exchange_of_the_next_launch": ["passed", "passed"],
    }
    text = report.failures()
    assert "rank one leaves" in text and "the others did not end the test within 3 s" in text
    assert "in test_left_alone" in text.split("--- output of rank 0 ---")[1]


@pytest.mark.thorough
def test_a_single_rank_runs_without_a_launcher(tmp_path: Path) -> None:
    report = _run(tmp_path, "def test_a(rank, size, gather): assert (rank, size, gather(5)) == (0, 1, [5])", ranks=1)
    assert _outcomes(report) == {"test_a": ["passed"]}
    assert not report.failures()


@pytest.mark.thorough
def test_script_on_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('rank', os.environ['HOROVOD_RANK'], sys.argv[1])\nsys.exit(3)")
    done = launch_on_ranks(2, script, "argument")
    assert done.returncode != 0
    assert "argument" in done.stdout and "Exit code: 3" in done.stdout


@pytest.mark.thorough
def test_script_on_ranks_that_hangs_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint('mark', os.getpid(), flush=True)\ntime.sleep(1000)")
    for timeout in (25, 100, 400):  # until both have begun in it
        with pytest.raises(subprocess.TimeoutExpired) as caught:
            launch_on_ranks(2, script, timeout=timeout)
        pids = [int(line.split()[-1]) for line in str(caught.value.output).splitlines() if "mark" in line]
        if len(pids) == 2:
            break
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
