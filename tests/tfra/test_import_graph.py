"""Files of `dynamic_embedding` import one way: none needs, directly or through others, one that needs it."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import tfplugin

ROOT = Path(tfplugin.__file__).parent
PACKAGE = "tfplugin.dynamic_embedding"


def imports(path: Path, modules: set[str]) -> set[str]:
    """What a file imports of these modules, in functions and for type checkers, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # A module of a package, or a name in a module.
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    inside = {name for name in found & modules if any(other.startswith(f"{name}.") for other in found & modules)}
    return (found & modules) - inside


def test_no_file_is_in_a_circle():
    paths = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "dynamic_embedding").rglob("*.py")
    }
    assert len(paths) > 40 and f"{PACKAGE}.variable" in paths
    graph = {name: imports(path, set(paths)) for name, path in paths.items()}
    assert f"{PACKAGE}.sharded_table" in graph[f"{PACKAGE}.variable"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
