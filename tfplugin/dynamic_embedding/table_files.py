"""Tables as bare files of keys and rows: what TFRA's `save_to_file_system` writes and `load_from_file_system` reads.

    <name>_mht_<i>of<devices>_rank<r>_size<processes>-keys       i from 1, r from 0; keys one after the other
    <name>_mht_<i>of<devices>_rank<r>_size<processes>-values     rows in the same order

There is no header, so a file can only be checked by its size. Specified in docs/dialects/tfra.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin.dynamic_embedding.python_ops import python_op

#: The variable of the environment that names the folder, and wins over an argument.
FOLDER_VARIABLE = "TFRA_SAVED_KV"
#: Keys that are read or written at once where nobody says.
BUFFER_SIZE = 4194304
#: And no more bytes of rows than these.
_BATCH_BYTES = 64 << 20
_SHARD = re.compile(r"_mht_(?P<i>\d+)of(?P<n>\d+)(?:_rank(?P<rank>\d+)_size(?P<size>\d+))?-keys")


def shard_names(name: str, devices: int, proc_size: int = 1, proc_rank: int = 0) -> list[str]:
    """What the files of each of a process' tables begin with.

    Raises:
      ValueError: the rank is not one of the processes.

    Example:
      >>> shard_names("tower/user", 2)
      ['tower_user_mht_1of2_rank0_size1', 'tower_user_mht_2of2_rank0_size1']
    """
    if proc_size < 1 or not 0 <= proc_rank < proc_size:
        raise ValueError(
            f"Files of dynamic embedding variable '{name}': proc_rank must be from 0 to proc_size - 1, got proc_rank "
            f"{proc_rank} and proc_size {proc_size}."
        )
    base = name.replace("/", "_")
    return [f"{base}_mht_{i + 1}of{devices}_rank{proc_rank}_size{proc_size}" for i in range(devices)]


# ---- Writing ----


def save(
    tables: Sequence[Any],
    names: Sequence[str],
    owner: str,
    dirpath: Any,
    dirpath_env: str | None = FOLDER_VARIABLE,
    append_to_file: bool = False,
    buffer_size: int = BUFFER_SIZE,
    finish: Callable[[str], None] | None = None,
) -> Any:
    """Writes tables to two files each: beside the old ones, which they replace when all have been written.

    Args:
      tables: with an `export` method.
      names: what the files of each begin with.
      owner: for messages.
      dirpath: the folder, also a string tensor; it is made where there is none.
      dirpath_env: the environment variable that wins over `dirpath`.
      append_to_file: whether rows come behind those that the files have.
      buffer_size: rows to write at once.
      finish: called with the folder when all files are there.

    Returns:
      The op (graph mode).

    Raises:
      TypeError: strings, which such files do not hold.
      ValueError: as many names as tables are wanted.
    """
    _check_names(owner, names, len(tables))
    columns = [column for table in tables for column in table.export()]
    for column in columns:
        _check_no_strings(owner, column.dtype)

    def write(folder: Any, *arrays: np.ndarray) -> None:
        folder = _folder(folder, dirpath_env)
        tf.io.gfile.makedirs(folder)
        paths = [_join(folder, f"{name}-{what}") for name in names for what in ("keys", "values")]
        try:
            for path, array in zip(paths, arrays, strict=True):
                _write_beside(path, array, append_to_file, buffer_size)
        except BaseException:
            for path in filter(tf.io.gfile.exists, map(_beside, paths)):
                tf.io.gfile.remove(path)
            raise
        for path in paths:
            tf.io.gfile.rename(_beside(path), path, overwrite=True)
        _sync(folder)
        if finish is not None:
            finish(folder)

    return call(write, [_text(dirpath), *columns], [])


def _beside(path: str) -> str:
    return f"{path}.writing"


def _write_beside(path: str, array: np.ndarray, append: bool, buffer_size: int) -> None:
    with tf.io.gfile.GFile(_beside(path), "wb") as file:
        file.write(b"")  # Without a write there would be no file.
        if append and tf.io.gfile.exists(path):
            with tf.io.gfile.GFile(path, "rb") as old:
                shutil.copyfileobj(old, file, _BATCH_BYTES)
        batch = _batch(buffer_size, array.dtype.itemsize * int(np.prod(array.shape[1:])))
        for start in range(0, len(array), batch):
            file.write(np.ascontiguousarray(array[start : start + batch]).tobytes())
    _sync(_beside(path))


def replace(path: str, content: bytes, writer: int) -> None:
    """Replaces a small file by a whole one. `writer` is a number that no other process has that writes it now."""
    beside = f"{path}.{writer}.writing"
    with tf.io.gfile.GFile(beside, "wb") as file:
        file.write(content)
    _sync(beside)
    tf.io.gfile.rename(beside, path, overwrite=True)


def remove_others(folder: str, name: str, devices: int, processes: int) -> None:
    """Removes the files of a variable that were saved with other numbers of devices or processes."""
    for file, match in list(_of_base(name, folder)):
        if (int(match["n"]), int(match["size"] or 1)) != (devices, processes):
            for what in ("keys", "values"):
                path = _join(folder, f"{file.removesuffix('-keys')}-{what}")
                with contextlib.suppress(tf.errors.NotFoundError):  # Another process may have removed it.
                    tf.io.gfile.remove(path)


def _sync(path: str) -> None:
    """Has what was written reach the disk. File systems that are not mounted see to that when a file is closed."""
    if "://" in path:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Reading ----


def load(
    upsert: Callable[[tf.Tensor, tf.Tensor], Any],
    find: Callable[[str], list[str]],
    owner: str,
    key_dtype: tf.DType,
    value_dtype: tf.DType,
    dim: int,
    dirpath: Any,
    dirpath_env: str | None = FOLDER_VARIABLE,
    buffer_size: int = BUFFER_SIZE,
) -> Any:
    """Gives the rows of files to `upsert`, batch by batch. All files are checked before the first row is read.

    Args:
      upsert: takes keys [n] and rows [n, dim].
      find: gets the paths out of a folder, less ``-keys`` and ``-values``.
      owner: for messages.
      key_dtype, value_dtype, dim: of the rows.
      dirpath, dirpath_env, buffer_size: as of `save`.

    Returns:
      The op (graph mode).

    Raises:
      TypeError: strings.
      FileNotFoundError: a file is not there. In a graph, a `tf.errors.OpError`, as for the next.
      ValueError: sizes of files that these dtypes and this width do not have.
    """
    for dtype in (key_dtype, value_dtype):
        _check_no_strings(owner, dtype)
    key_type, value_type = np.dtype(key_dtype.as_numpy_dtype), np.dtype(value_dtype.as_numpy_dtype)
    batch = _batch(buffer_size, value_type.itemsize * dim)

    def plan(folder: Any) -> np.ndarray:
        """The (file, first row, rows) of each batch."""
        starts = []
        for number, path in enumerate(find(_folder(folder, dirpath_env))):
            rows = _rows(owner, path, key_type, value_type, dim)
            starts += [(number, start, min(batch, rows - start)) for start in range(0, rows, batch)]
        return np.array(starts, np.int64).reshape(-1, 3)

    def read(folder: Any, piece: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        number, start, count = (int(x) for x in piece)
        path = find(_folder(folder, dirpath_env))[number]
        keys = _read(f"{path}-keys", start, count, key_type)
        return keys, _read(f"{path}-values", start * dim, count * dim, value_type).reshape(-1, dim)

    where = _text(dirpath)
    pieces = call(plan, [where], tf.int64)
    if tf.executing_eagerly():
        for piece in pieces:
            upsert(*(tf.constant(column) for column in read(where, piece)))
        return None

    def body(i: tf.Tensor) -> tf.Tensor:
        keys, rows = python_op(read, [where, pieces[i]], [key_dtype, value_dtype])
        keys.set_shape([None])
        rows.set_shape([None, dim])
        written = upsert(keys, rows)
        with tf.control_dependencies([] if written is None else [written]):
            return i + 1

    pieces.set_shape([None, 3])
    done = tf.while_loop(
        lambda i: i < tf.shape(pieces)[0], tf.autograph.experimental.do_not_convert(body), [0], parallel_iterations=1
    )
    return tf.nest.flatten(done)[0].op


def read_all(
    owner: str, folder: str, names: Sequence[str], key_dtype: tf.DType, value_dtype: tf.DType, dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """The keys [n] and rows [n, dim] of files of these names, one after the other.

    Raises:
      FileNotFoundError, ValueError: as of `load`.
    """
    key_type, value_type = np.dtype(key_dtype.as_numpy_dtype), np.dtype(value_dtype.as_numpy_dtype)
    keys, rows = [np.zeros(0, key_type)], [np.zeros((0, dim), value_type)]
    for path in named(names, owner, len(names))(folder):
        count = _rows(owner, path, key_type, value_type, dim)
        keys.append(_read(f"{path}-keys", 0, count, key_type))
        rows.append(_read(f"{path}-values", 0, count * dim, value_type).reshape(-1, dim))
    return np.concatenate(keys), np.concatenate(rows)


def named(names: Sequence[str], owner: str, tables: int) -> Callable[[str], list[str]]:
    """Finds the files of these names."""
    _check_names(owner, names, tables)

    def find(folder: str) -> list[str]:
        paths = [_join(folder, name) for name in names]
        for path in paths:
            for what in ("keys", "values"):
                if not tf.io.gfile.exists(f"{path}-{what}"):
                    raise FileNotFoundError(
                        f"Loading dynamic embedding variable '{owner}': there is no file '{path}-{what}'. "
                        f"{_others(folder)} Give the proc_size, the proc_rank and the number of devices that they "
                        "were written with, or load any number by load_from_file_system_with_restore_function."
                    )
        return paths

    return find


def of(name: str, devices: int, proc_size: int, proc_rank: int, others: str = "") -> Callable[[str], list[str]]:
    """Finds the files of this process, or where there are none, those whose names begin with a match of `others`."""
    shard_names(name, devices, proc_size, proc_rank)

    def find(folder: str) -> list[str]:
        names = shard_names(_own_or_other(name, others, folder), devices, proc_size, proc_rank)
        return named(names, name, devices)(folder)

    return find


def _own_or_other(name: str, others: str, folder: str) -> str:
    """What the files of a variable begin with."""
    base = name.replace("/", "_")
    bases = {file.rpartition("_mht_")[0] for file in _list(folder) if file.endswith("-keys")}
    found = sorted(found for found in bases if others and re.fullmatch(others, found))
    if base in bases or not found:
        return base
    if len(found) > 1:
        raise ValueError(
            f"Loading dynamic embedding variable '{name}': '{folder}' has no files of that name, and several that may "
            f"be meant: {', '.join(found)}. Say which by file_name_list."
        )
    return found[0]


def all_of(name: str, others: str = "") -> Callable[[str], list[str]]:
    """Finds all files of the variable `name`, whatever is behind ``_mht_``. `others` as of `of`."""

    def find(folder: str) -> list[str]:
        own = _own_or_other(name, others, folder)
        found = [_join(folder, file) for file, _ in _of_base(own, folder, any_shard=True)]
        if not found:
            raise FileNotFoundError(_nothing(name, folder))
        return [path.removesuffix("-keys") for path in found]

    return find


def of_any_number(
    name: str, devices: int, proc_size: int, proc_rank: int, others: str = ""
) -> Callable[[str], list[str]]:
    """Finds the files of this process, or those of all where other numbers of devices or processes wrote them.

    The found files may hold rows of other processes, too. `others` as of `of`.
    """
    shard_names(name, devices, proc_size, proc_rank)

    def find(folder: str) -> list[str]:
        base = _own_or_other(name, others, folder)
        own = shard_names(base, devices, proc_size, proc_rank)
        saves: dict[tuple[int, int], dict[tuple[int, int], str]] = {}
        for file, match in _of_base(base, folder):
            shard = (int(match["rank"] or 0), int(match["i"]))
            saves.setdefault((int(match["n"]), int(match["size"] or 1)), {})[shard] = file.removesuffix("-keys")
        if not saves:
            raise FileNotFoundError(_nothing(name, folder))
        if (devices, proc_size) in saves:
            present = set(saves[devices, proc_size].values())
            if present.issuperset(own):
                return [_join(folder, file) for file in own]
        if len(saves) > 1:
            raise ValueError(
                f"Loading dynamic embedding variable '{name}': '{folder}' has files of several saves, of "
                f"{_numbers(saves)}: keep those of one."
            )
        ((n, size), files), *_ = saves.items()
        missing = [(r, i) for r in range(size) for i in range(1, n + 1) if (r, i) not in files]
        if missing:
            raise FileNotFoundError(
                f"Loading dynamic embedding variable '{name}': of {n} devices in each of {size} processes, '{folder}' "
                f"lacks device {missing[0][1]} of process {missing[0][0]}"
                f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}: bring all files of a save into it."
            )
        return [_join(folder, files[shard]) for shard in sorted(files)]

    return find


def _numbers(saves: Any) -> str:
    return " and ".join(f"{n} devices in {size} processes" for n, size in sorted(saves))


def _of_base(name: str, folder: str, any_shard: bool = False) -> Iterator[tuple[str, Any]]:
    """The files of keys of a variable, and what their names say."""
    base = name.replace("/", "_")
    for file in sorted(file for file in _list(folder) if file.startswith(base)):
        if any_shard and file.startswith("_mht_", len(base)) and file.endswith("-keys"):
            yield file, None
        match = None if any_shard else _SHARD.fullmatch(file[len(base) :])
        if match:
            yield file, match


def _list(folder: str) -> list[str]:
    return list(tf.io.gfile.listdir(folder)) if tf.io.gfile.isdir(folder) else []


def _nothing(name: str, folder: str) -> str:
    base = name.replace("/", "_")
    return (
        f"Loading dynamic embedding variable '{name}': there are no files '{base}_mht_<i>of<n>...-keys' in '{folder}'. "
        f"{_others(folder)} Give the folder and the name of the variable that was saved."
    )


def _others(folder: str) -> str:
    if not tf.io.gfile.isdir(folder):
        return "There is no such folder."
    found = sorted(file.removesuffix("-keys") for file in _list(folder) if file.endswith("-keys"))
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"The folder has {', '.join(found[:8]) or 'no tables'}{more}."


def _rows(owner: str, path: str, key_type: np.dtype[Any], value_type: np.dtype[Any], dim: int) -> int:
    """The number of rows in two files, whose sizes must agree."""
    keys, values = (tf.io.gfile.stat(f"{path}-{what}").length for what in ("keys", "values"))
    rows = keys // key_type.itemsize
    if keys % key_type.itemsize:
        raise ValueError(
            f"Loading dynamic embedding variable '{owner}': '{path}-keys' has {keys} bytes, which is no number of "
            f"{key_type.name} keys: it is cut off, or has keys of another dtype."
        )
    if values != rows * dim * value_type.itemsize:
        raise ValueError(
            f"Loading dynamic embedding variable '{owner}': '{path}-values' has {values} bytes, where the {rows} keys "
            f"in '{path}-keys' want {rows * dim * value_type.itemsize} of {value_type.name}[{dim}]: one of the files "
            "is cut off or of another save, or the dtypes or the width of the variable are others."
        )
    return rows


def _read(path: str, start: int, count: int, dtype: np.dtype[Any]) -> np.ndarray:
    with tf.io.gfile.GFile(path, "rb") as file:
        file.seek(start * dtype.itemsize)
        data = file.read(count * dtype.itemsize)
    if len(data) != count * dtype.itemsize:
        raise ValueError(f"Loading dynamic embedding variables: '{path}' became shorter while it was read.")
    return np.frombuffer(data, dtype)


# ---- Both ----


def _folder(given: Any, environment: str | None) -> str:
    folder = (os.environ.get(environment) if environment else None) or str(tf.compat.as_str(given))
    if not folder:
        raise ValueError("Files of dynamic embedding variables: give the folder, dirpath.")
    return folder


def _join(folder: str, file: str) -> str:
    return f"{folder.rstrip('/')}/{file}"  # also of a URL


def _text(dirpath: Any) -> Any:
    """A path as Python functions and ops take it: bytes in eager mode, else a tensor."""
    if tf.executing_eagerly():
        dirpath = dirpath.numpy() if isinstance(dirpath, tf.Tensor) else os.fspath(dirpath)
        return tf.compat.as_bytes(dirpath)
    return dirpath if isinstance(dirpath, tf.Tensor) else tf.constant(os.fspath(dirpath))


def _batch(buffer_size: int, row_bytes: int) -> int:
    """Rows at once."""
    if isinstance(buffer_size, bool) or int(buffer_size) < 1:
        raise ValueError(f"Files of dynamic embedding variables: buffer_size must be 1 or more, got {buffer_size!r}.")
    return max(1, min(int(buffer_size), _BATCH_BYTES // max(1, row_bytes)))


def call(function: Callable[..., Any], inputs: Sequence[Any], result: Any) -> Any:
    """Calls a function of arrays; in a graph, the op that does. Eager code gets its exceptions as they are."""
    if tf.executing_eagerly():
        return function(*[x.numpy() if isinstance(x, tf.Tensor) else x for x in inputs])
    return python_op(function, inputs, result)


def _check_names(owner: str, names: Sequence[str], tables: int) -> None:
    if len(names) != tables or len(set(names)) != tables:
        raise ValueError(
            f"Files of dynamic embedding variable '{owner}': its {tables} tables want as many names in file_name_list, "
            f"all different, got {list(names)}."
        )


def _check_no_strings(owner: str, dtype: tf.DType) -> None:
    if dtype == tf.string:
        raise TypeError(
            f"Files of dynamic embedding variable '{owner}': they hold numbers, and it has strings: save it in a "
            "checkpoint, with a creator that has no saver."
        )
