from __future__ import annotations

from pathlib import Path

import pytest

import kvtools
from kvtools.cli.main import main

Capture = pytest.CaptureFixture[str]
SAMPLE = Path(__file__).parents[1] / "data" / "tfplus"


def test_slots_are_cut_and_put_together(tmp_path: Path, capsys: Capture) -> None:
    cut = ["rename", str(SAMPLE), str(tmp_path / "a"), "--to", "tfplugin", "--split-slot", "GroupAdam=m,v,z"]
    assert main(cut) == 0
    assert capsys.readouterr().out.startswith("slot GroupAdam -> m, v, z\n")
    assert kvtools.open(tmp_path / "a").table("test/kv_embedding").slots == ("m", "v", "z")
    assert main(["rename", str(tmp_path / "a"), str(tmp_path / "b"), "--join-slots", "m,v,z=GroupAdam"]) == 0
    assert kvtools.open(tmp_path / "b").table("test/kv_embedding").slots == ("GroupAdam",)
    assert main(["rename", str(SAMPLE), str(tmp_path / "c"), "--split-slot", "Adam=m,v"]) == 1
    assert "no table has slot 'Adam'; there are 'GroupAdam'" in capsys.readouterr().err
    assert not list(tmp_path.glob("c*"))
