from __future__ import annotations

import errno
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvtools.cli.main import main
from kvtools.server import run
from kvtools.server.settings import Settings
from kvtools.server.sources import ModelSource
from kvtools.server.version_policy import VersionPolicy


def test_without_fastapi(sample_path: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['fastapi'] = None; from kvtools.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", str(sample_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "pip install 'kvtools[serve]'" in done.stderr


def test_port_that_is_taken(sample_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", str(sample_path), "--port", str(taken.getsockname()[1])]) == 1
    assert "name another --host or --port" in capsys.readouterr().err


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the server would have been started with."""
    calls: list[Any] = []
    monkeypatch.setattr(run, "serve", lambda *arguments, **rest: calls.append((*arguments, rest)) or 0)
    return calls


def test_defaults_are_those_of_the_settings(served: list[Any]) -> None:
    assert main(["serve", "exported"]) == 0
    sources, settings, _, rest = served[0]
    assert sources == [ModelSource("default", "exported")]
    assert settings == Settings() and rest == {"as_json": False, "quiet": False}


def test_several_models_with_policies_and_labels(served: list[Any]) -> None:
    arguments = ["serve", "ctr=models/ctr", "cvr=models/cvr", "--versions", "ctr:latest 2", "--versions", "cvr:all"]
    assert main([*arguments, "--label", "ctr:stable=7", "--label", "ctr:canary=8", "--poll", "0.5"]) == 0
    assert served[0][0] == [
        ModelSource("ctr", "models/ctr", VersionPolicy("latest", 2), {"stable": 7, "canary": 8}),
        ModelSource("cvr", "models/cvr", VersionPolicy("all")),
    ]
    assert served[0][1].poll == 0.5


def test_a_path_that_is_there_is_no_name(served: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "day=1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "day=1", "--model-name", "ctr", "--versions", "3,5", "--label", "stable=3"]) == 0
    assert served[0][0] == [ModelSource("ctr", "day=1", VersionPolicy("specific", numbers=(3, 5)), {"stable": 3})]


def test_the_environment(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOST": "0.0.0.0", "PORT": "80", "POLL": "5", "WORKERS": "3", "GRACE": "7"}.items():
        monkeypatch.setenv(f"KVTOOLS_SERVE_{name}", value)
    assert main(["serve", "exported", "--port", "81"]) == 0
    assert served[0][1] == Settings(host="0.0.0.0", port=81, poll=5, workers=3, grace=7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--port", "70000"], "got --port 70000, expected 0 to 65535"),
        (["a", "--max-keys", "0"], "got --max-keys 0, expected 1 or more"),
        (["a", "--workers", "0"], "got --workers 0, expected 1 or more"),
        (["a", "--grace", "-1"], "got --grace -1, expected 0 to 1e+06"),
        (["a", "--keep-alive", "inf"], "got --keep-alive inf, expected 0.05 to 1e+06"),
        (["a", "--poll", "0"], "got --poll 0, expected 0.05 to 1e+06"),
        (["a", "--missing", "nan"], "got --missing nan, expected zeros, default, error"),
        (["a", "b"], "two models of the name 'default'; write NAME=PATH"),
        (["x=a", "x=b"], "two models of the name 'x'"),
        (["a", "--versions", "newest"], "got versions 'newest', expected 'latest N', 'all' or numbers"),
        (["a", "--versions", "z:latest"], "expected the name of a model before it, such as default:latest 2"),
        (["x=a", "y=b", "--versions", "all"], "expected the name of a model before it, such as x:latest 2"),
        (["x=a", "y=b", "--label", "z:stable=1"], "expected the name of a model before it, such as x:stable=7"),
        (["a", "--label", "stable"], "expected a label and a number, such as stable=7"),
        (["a", "--label", "x=1", "--label", "x=2"], "got --label x of version 1 and of 2, expected one version for it"),
        (["a", "--versions", "3", "--versions", "5"], "got --versions twice for model 'default', expected it once"),
        (["a", "--dialect", "snapshto"], "dialect 'snapshto': there is none; expected one of"),
        (["a", "--label", "stable=new"], "expected a label and a number, such as stable=7"),
        ([], "PATH"),
        (["a", "--versions", "latest", "3"], "a path '3'; write --versions 'latest 3', in quotes"),
        (["--versions", "x:latest", "3", "x=a"], "write --versions 'latest 3', in quotes"),
        (["ads/it=/"], "got the name 'ads/it', expected a letter, then letters, digits"),
        (["a", "--model-name", "ads/it"], "got --model-name 'ads/it', expected letters, digits"),
        (["--follow", "a", "--model-name", ""], "got --model-name '', expected letters, digits"),
        (["x=a", "--model-name", "y"], "got --model-name y and x=a, which has a name"),
        (["--backend", "http://[::1]:6379/0"], "got 'http://[::1]:6379/0', expected redis://host:port/database"),
        (["a", "--backend", "127.0.0.1:6379"], "got '127.0.0.1:6379', expected redis://host:port/database"),
        (["--backend", "localhost:6379/0"], "expected redis://host:port/database"),
        (["--backend", "redis://localhost/x"], "got database 'x', expected a number"),
        (["--follow", "a", "--follow", "b"], "two models called 'default'; write --follow NAME=b"),
        (["a", "--follow", "b"], "two models called 'default'; write --follow NAME=b"),
        (["--follow", "redis://localhost/0"], "expected a folder of checkpoints and increments"),
        (["--follow", "a", "--backend", "redis://localhost/0"], "got --follow and --backend, expected one of them"),
        (["--follow", "a", "--rows-from", "http://rows:8501"], "got --follow and --rows-from"),
        (["a", "--rows-from-ca", "ca.pem"], "got --rows-from-ca and no --rows-from https://"),
        (["a", "--rows-from", "http://rows:8501", "--rows-from-ca", "ca.pem"], "and no --rows-from https://"),
        (
            ["a", "--rows-from", "https://rows:8501", "--rows-from-ca", "nope.pem"],
            "reading --rows-from-ca 'nope.pem': No such file or directory",
        ),
        (
            ["a", "--rows-from", "https://rows:8501", "--rows-from-ca", "/dev/null"],
            "--rows-from-ca '/dev/null' has no certificate in PEM",
        ),
        (["--follow", "a", "--versions", "all"], "got --versions, and a chain has one version: the newest"),
        (["--follow", "a", "--label", "x=1"], "got --label, and a chain has one version: the newest"),
    ],
)
def test_usage_errors(served: list[Any], capsys: Any, arguments: list[str], message: str) -> None:
    assert main(["serve", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not served


def test_chains_have_names_as_models_do(served: list[Any]) -> None:
    assert main(["serve", "ctr=models/ctr", "--follow", "runs/a", "--follow", "cvr=runs/b", "--poll", "0.2"]) == 0
    sources, settings, *_ = served[0]
    assert sources == [ModelSource("ctr", "models/ctr")]
    assert settings.follow == (("default", "runs/a"), ("cvr", "runs/b")) and settings.poll == 0.2
    assert main(["serve", "ctr=models/ctr", "--follow", "runs/a", "--model-name", "live"]) == 0
    assert served[1][1].follow == (("live", "runs/a"),)
    assert main(["serve", "--follow", "runs/a"]) == 0
    assert served[2][0] == []


def test_following_to_what_is_no_redis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["follow", "run", "--to", "localhost"]) == 2
    assert "got --to localhost, expected a Redis" in capsys.readouterr().err
    assert main(["follow", "run", "--to", "redis://localhost/0", "--poll", "0"]) == 2
    assert "got --poll 0, expected 0.01 to 3600" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--grpc-port", "8501"], "--port 8501 and --grpc-port 8501"),
        (["--port", "0", "--grpc-port", "9000", "--resp-port", "9000"], "--grpc-port 9000 and --resp-port 9000"),
    ],
)
def test_each_protocol_has_a_port_of_its_own(
    served: list[Any], capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    assert main(["serve", "exported", *options]) == 2
    assert named in capsys.readouterr().err and not served
    assert main(["serve", "exported", "--port", "0", "--grpc-port", "0", "--resp-port", "0"]) == 0


def test_no_place_for_what_workers_share(
    sample_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastapi")

    def full(**_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    assert main(["serve", str(sample_path), "--port", "0", "--workers", "2"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device; name one that can be written by TMPDIR" in line


def test_following_a_member_names_its_folder(served: list[Any], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "ckpt-2.delta.index").touch()
    assert main(["serve", "--follow", f"live={tmp_path}/ckpt-2.delta", "--wait"]) == 2
    assert f"that is one member of a chain; name its folder, '{tmp_path}'" in capsys.readouterr().err
    assert not served
