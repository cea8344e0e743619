"""URLs that name a checkpoint in a store, and those that are refused; nothing that gives access is ever told."""

from __future__ import annotations

import builtins
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvtools
from kvtools.cli.main import main
from kvtools.errors import BadInputError, MissingDependencyError, UsageError
from kvtools.remote import fault, store
from kvtools.remote.paths import local_path
from kvtools.remote.url import is_remote, parse
from kvtools.url_password import without_password


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("S3://bucket/a/", "s3://bucket/a"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a@b:c/d", "s3://bucket/a@b:c/d"),
        ("s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/train/x", "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/train/x"),
        ("abfs://container@account.dfs.core.windows.net/a", "abfs://container@account.dfs.core.windows.net/a"),
        ("hdfs://user@namenode:8020/a", "hdfs://user@namenode:8020/a"),
        ("hdfs:///a/b", "hdfs://default/a/b"),
        ("memory:///a/b", "memory://a/b"),
        ("https://host:8080/a/b.npz?X-Amz-Signature=abc#frag", "https://host:8080/a/b.npz"),
        ("file:///etc/x", "file://etc/x"),
    ],
)  # fmt: skip
def test_urls_that_are_taken(text: str, told: str) -> None:
    assert is_remote(text)
    assert parse(text).text == told


@pytest.mark.parametrize(
    "text",
    [
        "simplecache::s3://bucket/a",
        "filecache::https://host/a",
        "zip://a::s3://bucket/b.zip",
        "s3://bucket::file:///etc/passwd",
        "reference://::s3://bucket/a",
        "s3://key:sEcReT@bucket/a",
        "s3://key@bucket/a",
        "s3://key:sEcR/eT@bucket/a",
        "https://user:sEcReT@host/a",
        "http://user@host/a",
        "hdfs://user:sEcReT@namenode/a",
        "abfs://container:sEcReT@account/a",
        "sftp://user:sEcReT@host/a",
        "s3://bucket/../other/a",
        "s3://bucket/a/../../b",
        "s3://bucket/a//b",
        "s3://bucket/./a",
        "s3://../a",
        "s3:///a",
        "s3://bucket/a\nb",
        "s3://bucket/\0",
        "ftp://host/a",
        "github://user:repo@main/a",
        "git:///etc",
        "dir://etc",
        "data://text",
        "local:///etc/passwd",
        "nothing://a",
    ],
)
def test_urls_that_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_remote(text)
    with pytest.raises(UsageError) as raised:
        kvtools.open(text)
    assert "sEcR" not in str(raised.value) and "eT@" not in str(raised.value)
    assert main(["inspect", text]) == 2
    assert "sEcR" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["redis://:x@localhost", "a/b", "rediss://h/0", "C:/x", "a::b", "memory:/x"])
def test_what_is_no_url_of_a_store_stays_as_it_is(text: str) -> None:
    assert not is_remote(text)
    assert local_path(text) == text


def test_queries_and_users_are_not_told() -> None:
    told = without_password("reading 'https://h/a.npz?X-Amz-Credential=AK&X-Amz-Signature=abc&x=1': refused")
    assert told == "reading 'https://h/a.npz?X-Amz-Credential=***&X-Amz-Signature=***&x=1': refused"
    assert "sig=***" in without_password("https://acc.blob.core.windows.net/c/a?sv=1&sig=abc%2B")
    assert without_password("s3://bucket/user@example.org/x") == "s3://bucket/user@example.org/x"
    assert without_password("s3://key:a/b@bucket/x") == "s3://bucket/x"


def test_secrets_of_the_environment_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecretkey")
    told = fault.reason_of(ValueError("refused topsecretkey at https://h/x?Signature=abc"))
    assert "topsecret" not in told and "abc" not in told and "refused ***" in told


@pytest.mark.parametrize(
    ("url", "package"),
    [("gs://bucket/a", "gcsfs"), ("abfs://c/a", "adlfs"), ("oss://b/a", "ossfs"), ("s3://b/a", "kvtools[remote]")],
)
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, url: str, package: str) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] in ("gcsfs", "adlfs", "ossfs", "s3fs"):
            raise ImportError(f"No module named '{name}'")
        return real(name, *arguments, **keywords)

    registry = importlib.import_module("fsspec.registry")
    monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.setattr(registry, "registry", {})
    for name in ("gcsfs", "adlfs", "ossfs", "s3fs"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(store, "_stores", {})
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError) as raised:
        kvtools.open(url)
    assert package in str(raised.value) and "pip install" in str(raised.value)


def test_fsspec_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setattr(store, "_stores", {})
    with pytest.raises(MissingDependencyError, match=r"kvtools\[remote\]"):
        kvtools.open("s3://bucket/a")


def test_local_paths_import_nothing_of_stores(tmp_path: Path) -> None:
    program = (
        "import sys, kvtools\n"
        "try: kvtools.open('no/such')\n"
        "except Exception as error: assert 'no such file' in str(error), error\n"
        "assert not {'fsspec', 's3fs', 'asyncio', 'kvtools.remote.mirror'} & set(sys.modules), sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_url_made_a_path_is_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from kvtools.array_table import ArrayTable

    monkeypatch.chdir(tmp_path)
    table = ArrayTable("emb", np.arange(3), np.ones((3, 2), np.float32))
    with pytest.raises(UsageError, match="lost a slash"):
        kvtools.write_tables([table], Path("s3://bucket/out.npz"), "npz")
    assert not [*tmp_path.iterdir()]


def test_following_and_keeping_versions_in_a_store_are_refused(memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, place = memory
    for command in (
        ["follow", f"{place}/train", "--to", "redis://localhost/0"],
        ["serve", "--follow", f"{place}/train"],
        ["serve", "--follow", f"name={place}/train"],
    ):
        assert main(command) == 2
        assert "follow the copy" in capsys.readouterr().err
    assert main(["export", f"{place}/m.ckpt", "--snapshot", f"{place}/1.kvsnap", "--keep", "3"]) == 2
    assert "rules remove old versions" in capsys.readouterr().err


def test_checksums_are_written_for_local_files_only(memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, place = memory
    assert main(["verify", f"{place}/m.ckpt", "--write-checksums"]) == 2
    said = capsys.readouterr().err
    assert "written for local files only; copy it" in said and f"`kvtools migrate {place}/m.ckpt OUT`" in said


def test_what_is_not_there_is_told_by_its_url(memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, place = memory
    with pytest.raises(BadInputError) as raised:
        kvtools.open(f"{place}/no/such.ckpt")
    assert f"'{place}/no/such.ckpt.index'" in str(raised.value) and "kvtools-remote" not in str(raised.value)
    assert main(["inspect", f"{place}/no/such.ckpt"]) == 1
    assert f"'{place}/no/such.ckpt.index'" in capsys.readouterr().err
