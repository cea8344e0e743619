"""The commands that benchmarks/many_tables.py measures run, and are all that read or write tables."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from kvtools.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
NOT_MEASURED = {
    *("completion", "dialects", "doctor", "hash", "man", "setup-horovod"),  # read no tables, but for names
    *("follow", "serve"),  # go on until they are ended
    *("log", "simulate"),  # read chains and logs
}


@pytest.mark.parametrize("kind", ["tables", "parts"])
def test_commands_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("duckdb")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import many_tables

    monkeypatch.chdir(tmp_path)
    many_tables.write_sources(tmp_path, [3])
    source = f"{kind}-3"
    made = many_tables.commands()
    commands = {name.split()[0] for name in made}
    assert commands - {"completion"} == set(COMMANDS) - NOT_MEASURED
    for number, (name, arguments) in enumerate(made.items()):
        if name.split()[0] == "report":
            continue  # plots take a second: tests/kvtools/test_report.py
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        status = main(many_tables._words(arguments, source, f"{number}/it"))
        said = capsys.readouterr()
        assert status == 0, f"{name}: {said.err}"
