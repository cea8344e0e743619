"""The page about protocols: its commands print what it shows, and its Python runs, against a server in a process."""

from __future__ import annotations

import re
import shlex
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
COMMANDS = re.findall(r"^\$ (curl .*)\n(.*)$", PAGE, re.MULTILINE)
PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


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
    with urllib.request.urlopen(urllib.request.Request(words[-1], data), timeout=60) as answer:
        assert answer.read().decode() == shown


@pytest.mark.parametrize("place", range(len(PYTHON)))
def test_the_python_of_the_page_runs(ports: dict[str, str], place: int) -> None:
    pytest.importorskip("tensorflow_serving" if "tensorflow_serving" in PYTHON[place] else "tritonclient.http")
    names: dict[str, object] = {}
    exec(compile(at(ports, PYTHON[place]), "serving-protocols.md", "exec"), names)
    expected = np.array([[9, 9.125, 9.25, 9.375], [0, 0, 0, 0]], np.float32)
    embeddings = names["embeddings"]
    assert isinstance(embeddings, np.ndarray) and embeddings.tobytes() == expected.tobytes()


def test_the_page_has_its_examples() -> None:
    assert (len(COMMANDS), len(PYTHON)) == (8, 2)
