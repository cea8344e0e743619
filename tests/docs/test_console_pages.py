"""The commands of the documentation run as they stand there, and print what the pages show."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chain_writer import ChainWriter
from page_blocks import ROOT, Command, blocks, commands, pages
from sample_folder import PIECES

import kvtools
from kvtools.array_table import ArrayTable
from kvtools.cli.main import main
from kvtools.migrate import write_tables

DATA = ROOT / "tests" / "data"
FILES = {
    "checkpoints": DATA / "sample",
    "deeprec": DATA / "deeprec",
    "deeprec-run": DATA / "deeprec",
    "dump": DATA / "sok",
    "run": DATA / "tfra" / "v1_adam",
    "sok": DATA / "sok",
    "tfplus": DATA / "tfplus",
    "torchrec": DATA / "torch",
    "tfplus-run": DATA / "tfplus",
    "tfra": DATA / "tfra",
}
"""What pages call the files of the tests."""

RUN_ELSEWHERE = {
    "README.md": "tests/docs/test_docs.py",
    "docs/quickstart.md": "tests/docs/test_docs.py",
    "docs/dialects/redis.md": "tests/kvtools/test_redis.py",
    "docs/dialects/snapshot.md": "tests/docs/test_snapshot_page.py",
    "docs/remote.md": "tests/remote/test_remote_page.py",
    "docs/serve.md": "tests/server/test_serving_protocols_page.py",
    "docs/serving-protocols.md": "tests/server/test_serving_protocols_page.py",
}
"""Pages whose commands another test runs."""

OTHER_FILES = {
    "docs/chain-tools.md": ("kvtools stats|diff train", "tests/cli/test_chain_commands.py"),
    "docs/client.md": ("kvtools split", "tests/cli/test_shape_commands.py"),
    "docs/dialects/deeprec.md": ("torn|mended", "tests/kvtools/test_deeprec.py"),
    "docs/dialects/hugectr.md": ("kvtools inspect saved", "tests/kvtools/test_hugectr.py"),
    "docs/dialects/sok-legacy.md": ("kvtools inspect saved", "tests/kvtools/test_sok_legacy.py"),
    "docs/diff.md": ("later", "tests/cli/test_diff.py"),
    "docs/explore.md": ("model.ckpt", "tests/kvtools/test_explore.py"),
    "docs/export.md": ("trained_model|model.ckpt-100", "tests/cli/test_export_whole_model.py"),
    "docs/inspect.md": ("torn", "tests/cli/test_inspect.py"),
    "docs/report.md": ("model.ckpt", "tests/cli/test_report.py"),
    "docs/stats.md": (r"\||/mnt/", "tests/cli/test_stats.py"),
    "docs/verify.md": ("bad|sok_dump", "tests/kvtools/test_checksum_file.py"),
}
"""Commands on files that are not here, trained or damaged for the page: what is in them, and the tests of such ones."""

IN_FORM = (
    "docs/advise.md",
    "docs/cast.md",
    "docs/chain-tools.md",
    "docs/clip.md",
    "docs/merge-split-rename.md",
    "docs/reshard.md",
    "docs/simulate.md",
    "docs/stats.md",
)
"""Pages whose numbers are of larger tables than those made here: their commands run, whatever they print."""

WRITTEN_AGAIN = {
    "docs/chain-tools.md": ("apply|diff train", "model.ckpt*"),
    "docs/merge-split-rename.md": ("split", "shards"),
    "docs/migrate.md": ("migrate", "moved"),
}
"""Commands, and what an earlier command of the page has written where they write."""

PROGRAMS = {
    *("curl", "horovodrun", "ls", "mkdir", "pip", "printf", "redis-cli", "tensorflow_model_server"),
    *("echo", "make", "RAY_ADDRESS=auto"),
}
"""Commands that are not ours, or that pass ours something."""

NOT_HERE = ("serve", "follow", "setup-horovod", "doctor")
"""Commands of kvtools that answer until they are ended, or look at the machine."""


def _model(folder: Path) -> None:
    rng = np.random.default_rng(5)
    for name in ("model.ckpt-100", "monday.ckpt", "tuesday.ckpt"):
        tables = []
        for table, count, dim in (("user_emb", 300, 8), ("item_emb", 90, 4)):
            rows = {slot: rng.normal(size=(count, dim)).astype(np.float32) for slot in ("values", "Adam.m", "Adam.v")}
            tables.append(
                ArrayTable(
                    table,
                    np.arange(count),
                    rows.pop("values"),
                    slots=rows,
                    freqs=rng.integers(1, 9, count).astype(np.uint32),
                    versions=(1_700_000_000 + rng.integers(0, 9_000_000, count)).astype(np.uint32),
                    version_unit="seconds",
                    part_rows=[count],
                )
            )
        write_tables(tables, folder / name, "tfplugin", beside=kvtools.open(DATA / "sample"), parts=4)


def _run(folder: Path) -> None:
    _model(folder)
    (folder / "checkpoints").mkdir()
    write_tables(
        [*kvtools.open(folder / "model.ckpt-100").tables.values()],
        folder / "checkpoints" / "model.ckpt-400",
        "tfplugin",
    )


def _shards(folder: Path) -> None:
    _model(folder)
    assert main(["split", str(folder / "model.ckpt-100"), str(folder / "shards" / "{}.ckpt"), "--by", "mod:2"]) == 0


def _chain(folder: Path) -> None:
    _model(folder)
    chain = ChainWriter(folder / "train", {"user_emb": 3})
    chain.put("user_emb", range(50), 1.0)
    chain.full()
    for step in range(4):
        chain.put("user_emb", range(3005 + step, 3010 + step), step)
        chain.increment()


def _pieces(*names: str) -> Callable[[Path], None]:
    """Make files that examples of `--help` name."""

    def make(folder: Path) -> None:
        for name in names:
            PIECES[name](folder)

    return make


def _logged(folder: Path) -> None:
    """Write a model, a log of its ids and a policy, the one that docs/simulate.md shows."""
    import pyarrow
    from pyarrow import parquet

    _model(folder)
    rng = np.random.default_rng(1)
    columns = {"user_id": rng.integers(0, 400, 3000), "item_emb": rng.integers(0, 90, 3000)}
    times = {"timestamp": 1_700_000_000 + 60 * np.arange(3000)}
    parquet.write_table(pyarrow.table(columns | times), folder / "ids.parquet")
    shown = next(block for block in blocks("docs/simulate.md") if block.language == "toml")
    (folder / "life.toml").write_text(shown.text)


PYTHON_OF_TOOLS = (
    *("docs/advise.md", "docs/simulate.md"),
    *("docs/neighbours.md", "docs/scan.md", "docs/top.md"),
    *("docs/chain-tools.md", "docs/clip.md", "docs/diff.md", "docs/repair.md", "docs/stats.md"),
    *("docs/dialects/arrow.md", "docs/dialects/hdf5.md", "docs/dialects/npz.md", "docs/dialects/parquet.md"),
)
"""Pages whose Python goes on with the files that their commands have written, and needs no TensorFlow."""

MADE: dict[str, Callable[[Path], None]] = {
    "docs/advise.md": _logged,
    "docs/simulate.md": _logged,
    "docs/cast.md": _model,
    "docs/chain-tools.md": _chain,
    "docs/clip.md": _model,
    "docs/dialects/npz.md": lambda folder: _moved(folder, "tables.npz"),
    "docs/dialects/safetensors.md": lambda folder: _moved(folder, "tables.safetensors"),
    "docs/get.md": lambda folder: (folder / "ids.txt").write_text("-7\n42\n"),
    "docs/merge-split-rename.md": _shards,
    "docs/policy-files.md": _pieces("model.ckpt-100", "policy.toml"),
    "docs/repair.md": _pieces("bad.ckpt-100", "damaged.ckpt-100"),
    "docs/neighbours.md": _model,
    "docs/reshard.md": _model,
    "docs/scan.md": _model,
    "docs/stats.md": _run,
    "docs/top.md": _model,
}


def _moved(folder: Path, to: str) -> None:
    assert main(["migrate", str(folder / "checkpoints"), str(folder / to)]) == 0


def _commands(page: str) -> list[Command]:
    found = [
        command
        for block in blocks(page)
        if block.language == "console" and not block.no_run
        for command in commands(block)
    ]
    return [command for command in found if command.text.startswith("kvtools ")]


def _run_here(page: str) -> list[Command]:
    other = OTHER_FILES.get(page, (r"(?!)", ""))[0]
    return [
        command
        for command in _commands(page)
        if command.arguments[1] not in NOT_HERE and not re.search(other, command.text)
    ]


PAGES = [page for page in pages() if page not in RUN_ELSEWHERE and _run_here(page)]


def _without_sizes(lines: list[str]) -> list[str]:
    """Lines without the bytes of a report: its plots are a little larger or smaller by what was drawn before."""
    return [re.sub(r'("html": "report.html", "bytes": )\d+', r"\1", line) for line in lines]


def _said(command: Command) -> tuple[int, list[str]]:
    """What a command of the page says, standard error at its place."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(command.arguments[1:])
    return status, [line.rstrip() for line in said.getvalue().splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_the_page_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text()
    for name, source in FILES.items():
        if MADE.get(page) is _run:
            continue
        if page in MADE or re.search(rf"\b{name}\b", text):
            shutil.copytree(source, name)
    MADE.get(page, lambda folder: None)(tmp_path)
    for command in _run_here(page):
        of_command, pattern = WRITTEN_AGAIN.get(page, (r"(?!)", ""))
        if re.search(of_command, command.text):
            for written in tmp_path.glob(pattern):
                shutil.rmtree(written) if written.is_dir() else written.unlink()
        status, said = _said(command)
        told = f"{page}:{command.line}: kvtools {' '.join(command.arguments[1:])}\n" + "\n".join(said)
        if page in IN_FORM or not command.printed:
            assert status in (0, 3) or (command.printed[:1] and command.printed[0].startswith("kvtools: ")), told
        else:
            assert _without_sizes(said) == _without_sizes(command.printed), told
    names = {"numpy": np, "np": np, "__name__": page}
    for package in ("pandas", "pyarrow"):
        names[package] = pytest.importorskip(package) if package in text else None
    for block in blocks(page):
        if block.language == "python" and not block.no_run and page in PYTHON_OF_TOOLS:
            # Line numbers in a traceback are those of the page.
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)


def test_every_command_of_a_page_is_of_a_known_program_and_every_named_test_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in pages():
        for block in blocks(page):
            for command in commands(block) if block.language == "console" else []:
                program = command.text.split()[0]
                where = f"{page}:{command.line}: {command.text}"
                assert program in PROGRAMS | {"kvtools"} or program.startswith((".venv/bin/", "kernels/")), where
                if program == "make":
                    assert command.arguments[1] in targets, where
                for word in command.text.split():
                    if word.startswith(("tests/", "benchmarks/", "kernels/", "examples/")):
                        assert (ROOT / word.rstrip(",")).exists(), where
    for test in [*RUN_ELSEWHERE.values(), *(test for _, test in OTHER_FILES.values())]:
        assert (ROOT / test).is_file(), test
