"""Whoever reads a checkpoint's files does so by `kvtools.remote.stored`: past it, a remote file would read as zeros."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KVTOOLS = Path(__file__).parents[2] / "kvtools"
COMMANDS = Path(__file__).parents[2] / "cli"

#: Readers that hold the bytes they open by hand, and what reads files that are never remote.
BY_HAND = {
    "dialects/bundle/reader.py": "it holds what it reads, by `_bytes_of`",
    "dialects/bundle/writer.py": "what was just written here",
    "dialects/same_file.py": "who opens a file by it holds what is read of it",
    "dialects/column.py": "it holds what it reads, by `_bytes`",
    "dialects/hdf5_file.py": "it holds what it reads, by `bytes`",
    "dialects/hdf5_output.py": "what is being written here",
    "dialects/npz.py": "what is being written here",
    "dialects/zip_archive.py": "what is being written here",
    "dialects/huggingface.py": "what was just written here",
    "dialects/torch_archive.py": "a part of a file that it opened by `open_binary`",
    "explore/page.py": "the package's own files",
    "id_log.py": "it keeps the whole log before it reads",
    "dialects/arrow.py": "it asks whether a file is remote",
    "dialects/tfra_files.py": "what is being written here",
    "dialects/safetensors.py": "what is being written here",
    "remote": "the layer itself",
    "key_join.py": "files of its own",
    "scratch_array.py": "files of its own",
    "slot_order.py": "what was just written here",
    "op_library.py": "the package's own files",
    "op_compiler.py": "the package's own files",
    "quiet_import.py": "standard error",
    "replace_output.py": "locks and syncs",
    "stock_model": "the package's own files",
}
READING = {"read_bytes", "read_text", "fromfile", "memmap", "memory_map", "OSFile", "load_file", "safe_open"}


def reads(path: Path) -> Iterator[str]:
    """Calls that open a file for reading by its path."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "kvtools.remote.stored"
        for alias in node.names
    }
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        first = ast.unparse(node.args[0]) if node.args else ""
        past = (
            (name in READING and name not in imported)
            or (name == "open" and (owner == "os" or first in ("'rb'", "'r'", "")))
            or (name in ("ZipFile", "ParquetFile", "File", "mmap") and not first.startswith("for_library"))
            or (name == "load" and owner in ("np", "numpy", "torch") and "BytesIO" not in first)
        )
        if past:
            yield f"{path.name}:{node.lineno}: {ast.unparse(node)[:60]}"


def test_nothing_is_read_past_the_layer() -> None:
    found = []
    for path in sorted(KVTOOLS.rglob("*.py")):
        inside = path.relative_to(KVTOOLS).as_posix()
        packages = {"cli", "server", "horovod_setup", "client", "doctor", "ops", "include"}
        if inside.split("/")[0] in packages or any(inside == one or inside.startswith(one + "/") for one in BY_HAND):
            continue
        found += reads(path)
    for path in sorted(COMMANDS.glob("*.py")):
        found += [] if path.name == "standard_output.py" else reads(path)
    assert not found, "use read_bytes, open_binary or for_library of kvtools.remote.stored:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line", ["path.read_bytes()", "path.open('rb')", "np.fromfile(path)", "np.load(path)", "zipfile.ZipFile(path)"]
)
def test_such_a_read_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.py").write_text(line)
    assert [*reads(tmp_path / "a.py")]
