"""The pages about lookups and protocols: commands print what they show, and their Python runs, against a server."""

from __future__ import annotations

import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("grpc_health")
from serving_processes import serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving-protocols.md").read_text()
LOOKUPS = (ROOT / "docs" / "serve.md").read_text()
COMMANDS = re.findall(r"^\$ (curl (?:.*\\\n)?.*)\n(.*)$", PAGE + LOOKUPS, re.MULTILINE)
PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE + LOOKUPS, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the page calls 8501 and 8500."""
    cache = tmp_path_factory.mktemp("cache")
    with serving(ROOT / "tests" / "data" / "sample", "--cache", str(cache)) as ports:
        yield {"127.0.0.1:8501": f"127.0.0.1:{ports.http}", "127.0.0.1:8500": f"127.0.0.1:{ports.grpc}"}


def at(ports: dict[str, str], text: str) -> str:
    for shown, real in ports.items():
        text = text.replace(shown, real)
    return text


@pytest.mark.parametrize(("command", "shown"), COMMANDS)
def test_a_command_prints_what_the_page_shows(ports: dict[str, str], command: str, shown: str) -> None:
    words = shlex.split(at(ports, command))
    data = words[words.index("-d") + 1].encode() if "-d" in words else None
    try:
        with urllib.request.urlopen(urllib.request.Request(words[-1], data), timeout=60) as answer:
            assert answer.read().decode() == shown
    except urllib.error.HTTPError as refused:
        assert refused.read().decode() == shown


@pytest.mark.parametrize("place", range(len(PYTHON)))
def test_the_python_of_the_page_runs(ports: dict[str, str], place: int) -> None:
    for package in ("tensorflow_serving", "tritonclient.http"):
        if package in PYTHON[place]:
            pytest.importorskip(package)
    names: dict[str, object] = {}
    exec(compile(at(ports, PYTHON[place]), "serving-protocols.md", "exec"), names)
    expected = np.array([[9, 9.125, 9.25, 9.375], [2, 2.125, 2.25, 2.375], [0, 0, 0, 0]], np.float32)
    embeddings = names["embeddings"]
    assert isinstance(embeddings, np.ndarray)
    assert embeddings.tobytes() == (expected if len(embeddings) == 3 else expected[[0, 2]]).tobytes()


def test_the_pages_have_their_examples() -> None:
    assert (len(COMMANDS), len(PYTHON)) == (13, 3)
