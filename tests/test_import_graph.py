"""No modules import each other in a circle: not within functions either, nor for types alone."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Folder of the repository -> what it is imported as.
PACKAGES = {
    "kvtools": "kvtools",
    "cli": "kvtools.cli",
    "horovod_setup": "kvtools.horovod_setup",
    "server": "kvtools.server",
    "tfplugin": "tfplugin",
}


def _modules() -> dict[str, Path]:
    """Every module by its name. Links, by which a checkout may stand for what is installed, are not followed."""
    found = {}
    for folder, package in PACKAGES.items():
        for directory, below, files in os.walk(ROOT / folder):
            below[:] = [name for name in below if name != "__pycache__"]
            for file in files:
                if file.endswith(".py"):
                    inside = (Path(directory) / file).relative_to(ROOT / folder).with_suffix("").parts
                    name = ".".join([package, *(part for part in inside if part != "__init__")])
                    found[name] = Path(directory) / file
    return found


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                for name in (f"{node.module}.{alias.name}", node.module):
                    if name in modules:
                        yield name
                        break


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(circles(graph)) == [["a", "b", "c"], ["d", "e"]]


def test_no_modules_import_each_other():
    modules = _modules()
    graph = {name: {to for to in _imported(path, modules) if to != name} for name, path in modules.items()}

    assert circles(graph) == []


def test_what_serves_and_reads_knows_nothing_of_the_plugin():
    modules = _modules()
    wrong = {
        name: [to for to in _imported(path, modules) if to.startswith("tfplugin")]
        for name, path in modules.items()
        if not name.startswith("tfplugin")
    }
    assert {name: targets for name, targets in wrong.items() if targets} == {}
