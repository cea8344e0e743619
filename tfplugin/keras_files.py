"""Files of Keras with the rows of tables: what a model saves has them and their slots, and what it loads brings them.

Keras writes and reads what it knows; the tables that layers hold go beside that into the same file, as `table_files`
has them: into a ``.keras`` archive, an HDF5 file, a folder, a pickled model. They are written some megabytes at a time.

- A file that is written to a path appears when it is whole: until then what was there stays.
- A file is looked at before it is loaded: where its tables are damaged, or are others than the model's, nothing is.
- What would still lack rows is an error: tables that no layer holds, `sok.Variable` s, tables of several ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfplugin import table_files
from tfplugin.held_tables import HeldTable, held_tables, keeps_rows_itself
from tfplugin.keras_builds import check_built
from tfplugin.keras_hooks import KerasHooks
from tfplugin.keras_models import held_by, is_shard, is_table, looked_up_elsewhere, quoted
from tfplugin.optimizers.inner_optimizer import innermost
from tfplugin.spilling import naming_the_way_out
from tfplugin.table_files import FOLDER, SavedTables
from tfplugin.wrapped_method import defining_class, wrap_method

# ---- What a file is to have ------------------------------------------------------------------------------------------


def _to_save(model: Any, what: str, *, hdf5: bool = False) -> list[HeldTable]:
    """The tables that go into a file of a model.

    Raises:
      ValueError: it would lack rows.
    """
    if not hasattr(model, "_flatten_layers"):
        return []
    _refuse_shards(model, what)
    refuse_not_held(model, what)
    held = held_tables(model)
    own = [one for one in held if keeps_rows_itself(one.layer)]
    if own and hdf5:
        raise ValueError(
            f"{what} of model '{model.name}' would lack the keys of {quoted(one.name for one in own)}: save a .keras "
            "file, or a tf.train.Checkpoint(model=model)."
        )
    return [one for one in held if one not in own]


def refuse_not_held(model: Any, what: str) -> None:
    """Raises ValueError for a model that has looked tables up which none of its layers holds."""
    parts = looked_up_elsewhere(model)
    if parts:
        beside = "tf.train.Checkpoint(model=model, table=table)"
        if any(getattr(part, "_in_backward", None) is not None for part in parts.values()):
            beside = (
                "tf.train.Checkpoint(model=model, table=table, updates=updates) with what tfplugin.apply_in_backward("
                "table, ...) returned as updates, which counts the steps"
            )
        raise ValueError(
            f"{what} of model '{model.name}' would lack the rows of key-value variable {quoted(parts)}, which the "
            "model looks up and no layer of it holds. Make it an attribute of the layer that looks it up; or save "
            f"{beside}, from which training goes on, too."
        )


def _name_of_shard(shard: Any) -> str:
    return str(shard.name).partition(":")[0]


def _saves_its_own(layer: Any) -> bool:
    """Whether the layer says by itself what it saves: a class that is not Keras's has the method."""
    owner = next((cls for cls in type(layer).__mro__ if "save_own_variables" in vars(cls)), None)
    return owner is not None and owner.__module__.partition(".")[0] not in ("keras", "tf_keras")


def _refuse_shards(model: Any, what: str) -> None:
    """Raises for `sok.Variable` s of which a file would lack rows.

    Those are all in layers of Keras 3, which has variables of its own kind only. tf_keras has what this rank holds.
    """
    names = {
        _name_of_shard(shard)
        for layer in model._flatten_layers()
        if not _saves_its_own(layer)
        for shard in held_by(layer, is_shard)
        if shard.num_gpus > 1 or not any(weight is shard for weight in layer.weights)
    }
    if names:
        raise ValueError(
            f"{what} of model '{model.name}' would lack rows of sok.Variable {quoted(names)}. Save them in a "
            "checkpoint: sok.Checkpoint(model=model), which any number of ranks restores, or on one rank "
            "tf.train.Checkpoint(model=model)."
        )


def shards_left_out(model: Any) -> list[str]:
    """The names of trainable `sok.Variable` s that are not among the weights of a model."""
    listed = {id(weight) for weight in model.weights}
    shards = (shard for layer in model._flatten_layers() for shard in held_by(layer, is_shard))
    return [_name_of_shard(shard) for shard in shards if shard.trainable and id(shard) not in listed]


# ---- One file within another's call ----------------------------------------------------------------------------------


class _Within(threading.local):
    """What Keras is in the midst of."""

    #: Whether it writes or reads what is Keras's own of a file whose tables are taken care of.
    plain = False
    #: Whose slots are to be settled once its optimizer has been loaded; None: at once.
    unsettled: list[tuple[SavedTables, Any, Any]] | None = None


_within = _Within()


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    before, _within.plain = _within.plain, True
    try:
        yield
    finally:
        _within.plain = before


@contextlib.contextmanager
def _settled_later() -> Iterator[None]:
    """Until the optimizer of what is loaded has its state."""
    before, _within.unsettled = _within.unsettled, []
    try:
        yield
        for saved, pairs, model in _within.unsettled:
            saved.settle(pairs, getattr(model, "optimizer", None))
            _warn_of_optimizer(saved, model)
    finally:
        _within.unsettled = before


def _is_remote(path: Any) -> bool:
    return "://" in str(path)


# ---- Writing ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _written_whole(target: Path) -> Iterator[Path]:
    """Gives a path beside `target`, of its name, that takes its place when the block ends: a file or a folder."""
    from kvtools.replace_output import check_free, sync, sync_tree, work_folder

    target = target.resolve()  # what a link leads to
    with work_folder(target) as scratch:
        staged = scratch / target.name
        yield staged
        if staged.is_dir():
            sync_tree(staged)
            target.mkdir(exist_ok=True)
            for entry in staged.iterdir():
                if (target / entry.name).is_dir():
                    shutil.rmtree(target / entry.name)
                entry.replace(target / entry.name)
        elif staged.exists():  # not where Keras was told not to overwrite
            sync(staged)
            check_free(target, force=True)
            staged.replace(target)
        sync(target.parent)


def _save_to(
    original: Callable[..., Any],
    model: Any,
    path: Any,
    held: Sequence[HeldTable],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Has Keras write a file beside its place, and puts the tables into it."""
    if _is_remote(path):
        return _save_remote(original, model, str(path), held, args, kwargs)
    with _written_whole(Path(path)) as staged:
        with _plain():
            returned = original(model, str(staged), *args, **kwargs)
        tables = staged.parent / FOLDER
        table_files.write(held, tables, getattr(model, "optimizer", None))
        _add(staged, tables)
    return returned


def _add(file: Path, tables: Path) -> None:
    if file.is_dir():
        tables.replace(file / FOLDER)
    elif zipfile.is_zipfile(file):
        with zipfile.ZipFile(file, "a") as archive:
            table_files.add_to_archive(archive, tables)
    else:
        import h5py

        with h5py.File(file, "r+") as opened:
            table_files.add_to_hdf5(opened, tables)


def _save_remote(
    original: Callable[..., Any],
    model: Any,
    path: str,
    held: Sequence[HeldTable],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    if path.startswith("hf://"):
        raise ValueError(
            f"Saving model '{model.name}' to '{path}': its tables do not go there. Save it to a file, and upload that."
        )
    with tempfile.TemporaryDirectory() as scratch:
        local = Path(scratch) / path.rpartition("/")[2]
        returned = _save_to(original, model, local, held, args, kwargs)
        tf.io.gfile.copy(str(local), path, overwrite=True)
    return returned


def _save_model(original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``.keras`` file, or the folder of one."""
    held = [] if _within.plain else _to_save(model, "A file of Keras's format")
    if not held or isinstance(filepath, io.IOBase):  # of a file object `_save_to_object` takes care
        return original(model, filepath, *args, **kwargs)
    return _save_to(original, model, filepath, held, args, kwargs)


def _save_to_object(original: Callable[..., Any], model: Any, fileobj: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``.keras`` archive in a file object: also of a model that is pickled or copied."""
    held = [] if _within.plain else _to_save(model, "A file of Keras's format")
    if held and not fileobj.readable():
        raise ValueError(f"Saving model '{model.name}': the file object is to be open for reading, too: mode 'w+b'.")
    returned = original(model, fileobj, *args, **kwargs)
    if held:
        with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(fileobj, "a") as archive:
            table_files.write(held, Path(scratch) / FOLDER, getattr(model, "optimizer", None))
            table_files.add_to_archive(archive, Path(scratch) / FOLDER)
    return returned


def _save_weights_only(original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``.weights.h5`` file."""
    held = [] if _within.plain else _to_save(model, "A file of Keras's format")
    max_shard_size, objects_to_skip = (*args, *[None] * (2 - len(args)))
    skipped = {id(one) for one in kwargs.get("objects_to_skip", objects_to_skip) or ()}
    held = [one for one in held if id(one.layer) not in skipped]
    if held and kwargs.get("max_shard_size", max_shard_size) is not None:
        raise ValueError(
            f"Saving the weights of model '{model.name}' with max_shard_size: the tables "
            f"{quoted(one.name for one in held)} go into one file only. Leave max_shard_size out."
        )
    return (
        _save_to(original, model, filepath, held, args, kwargs) if held else original(model, filepath, *args, **kwargs)
    )


def _save_model_to_hdf5(original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """An ``.h5`` file, which gets its tables by `_save_weights_to_hdf5`."""
    held = _to_save(model, "An HDF5 file", hdf5=True)
    if not held or not isinstance(filepath, (str, os.PathLike)) or _is_remote(filepath):
        return original(model, filepath, *args, **kwargs)
    overwrite = args[0] if args else kwargs.get("overwrite", True)
    if not overwrite and Path(filepath).exists():
        return original(model, filepath, *args, **kwargs)  # Keras asks
    with _written_whole(Path(filepath)) as staged:
        return original(model, str(staged), *args, **kwargs)


def _save_weights_to_hdf5(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The weights in a group of an ``.h5`` file. The Kerases call what they give by other names."""
    group, model = _group_and_model(args, kwargs)
    held = [] if model is None else _to_save(model, "An HDF5 file", hdf5=True)
    returned = original(*args, **kwargs)
    if held:
        with _scratch_beside(group.file.filename) as scratch:
            table_files.write(held, scratch / FOLDER, getattr(model, "optimizer", None))
            table_files.add_to_hdf5(group, scratch / FOLDER)
    return returned


def _group_and_model(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    given = [*args, *kwargs.values()]
    group = next((one for one in given if hasattr(one, "create_group")), None)
    return group, next((one for one in given if hasattr(one, "_flatten_layers")), None)


@contextlib.contextmanager
def _scratch_beside(file: Any) -> Iterator[Path]:
    """A folder that is gone afterwards: beside a file where that may be written, which has the room."""
    folder = Path(os.fsdecode(file)).absolute().parent
    beside = folder if folder.is_dir() and os.access(folder, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".kv_tables-", dir=beside) as scratch:
        yield Path(scratch)


def _save_weights(
    original: Callable[..., Any], model: Any, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any
) -> Any:
    """``save_weights`` of tf_keras: an ``.h5`` file, or a checkpoint of what is tracked from the model."""
    tracked = {
        id(part) for table in tf.train.TrackableView(model).descendants() if is_table(table) for part in table._kv_parts
    }
    if any({id(one) for one in part._kv_parts} - tracked for part in looked_up_elsewhere(model).values()):
        refuse_not_held(model, "The weights file")
    hdf5 = str(filepath).endswith((".h5", ".hdf5", ".keras")) and not _is_remote(filepath)
    if not hdf5 or not _to_load(model) or (Path(filepath).exists() and not overwrite):  # where Keras asks
        return original(model, filepath, overwrite, *args, **kwargs)
    with _written_whole(Path(filepath)) as staged:
        return original(model, str(staged), overwrite, *args, **kwargs)


# ---- Reading ---------------------------------------------------------------------------------------------------------


def _to_load(model: Any) -> list[HeldTable]:
    held = held_tables(model) if hasattr(model, "_flatten_layers") else []
    return [one for one in held if not keeps_rows_itself(one.layer)]


def _name(model: Any) -> str:
    return f"model '{getattr(model, 'name', type(model).__name__)}'"


def _restore(saved: SavedTables | None, model: Any, where: str) -> None:
    """Gives a model that has been loaded its rows."""
    held = _to_load(model)
    if held:
        check_built(model)
    if saved is None:
        _refuse_lacking(held, model, where)
        return
    pairs, _ = saved.matched(held, _name(model))
    _give(saved, pairs, model)
    _warn_of_optimizer(saved, model)


def _warn_of_optimizer(saved: SavedTables, model: Any) -> None:
    """Says so where Keras has not given the optimizer of a loaded model the state that it had, or not all of it."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not saved.iterations:
        return
    cores, steps = [innermost(one) for one in tf.nest.flatten(optimizer)], table_files.iterations_of(optimizer)
    name = f"optimizer {' and '.join(type(core).__name__ for core in cores)} of {_name(model)}"
    if steps != saved.iterations:
        warnings.warn(
            f"{saved.where}: Keras has not restored the state of {name}, which is at step {steps}, and was at "
            f"{saved.iterations}: the slots of tables begin anew, too, and losses are others than without the break.",
            stacklevel=4,
        )
    elif any(
        type(core).__name__ == "Nadam" and type(core).__module__.startswith("tf_keras.src.optimizers.nadam")
        for core in cores
    ):
        warnings.warn(
            f"{saved.where}: tf_keras saves no product of the momenta of {name}: losses are others than without the "
            "break.",
            stacklevel=4,
        )


def _give(saved: SavedTables, pairs: Any, model: Any) -> None:
    if _within.unsettled is None:
        saved.restore(pairs, getattr(model, "optimizer", None))
    else:
        saved.restore_all(pairs)
        _within.unsettled.append((saved, pairs, model))


def _refuse_lacking(held: Iterable[HeldTable], model: Any, where: str) -> None:
    lacking = [one.name for one in held if not _saves_its_own(one.layer)]
    if lacking:
        raise ValueError(
            f"{where} has no rows of {quoted(lacking)}, which {_name(model)} holds: it was written without tfplugin, "
            "or of another model. Nothing was loaded."
        )


def _load_model(original: Callable[..., Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``.keras`` file, or the folder of one."""
    if _within.plain or isinstance(filepath, io.IOBase) or _is_remote(filepath):
        return original(filepath, *args, **kwargs)
    path = Path(filepath)
    if path.is_dir():
        with _plain():
            model = original(filepath, *args, **kwargs)
        tables = path / FOLDER
        _restore(SavedTables(tables, f"'{path}'") if tables.exists() else None, model, f"'{path}'")
        return model
    if not path.exists() or not str(path).endswith(".keras"):
        return original(filepath, *args, **kwargs)  # an error of Keras's
    if not _has_tables(path):
        with _plain():
            model = original(filepath, *args, **kwargs)
        _restore(None, model, f"'{path}'")
        return model
    with _scratch_beside(path) as scratch:
        saved = _taken_from(path, f"'{path}'", scratch)
        with _plain():
            model = original(str(scratch / _OWN), *args, **kwargs)
        _restore(saved, model, f"'{path}'")
    return model


def _load_from_object(original: Callable[..., Any], fileobj: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``.keras`` archive in a file object: also of a pickled model, or one that was uploaded."""
    if _within.plain:
        return original(fileobj, *args, **kwargs)
    where = f"'{fileobj.name}'" if isinstance(getattr(fileobj, "name", None), str) else "The archive"
    if not _has_tables(fileobj):
        model = original(fileobj, *args, **kwargs)
        _restore(None, model, where)
        return model
    with tempfile.TemporaryDirectory() as scratch:
        saved = _taken_from(fileobj, where, Path(scratch))
        with (Path(scratch) / _OWN).open("rb") as own:
            model = original(own, *args, **kwargs)
        _restore(saved, model, where)
    return model


def _has_tables(file: Any) -> bool:
    with zipfile.ZipFile(file, "r") as archive:
        return bool(table_files.in_archive(archive))


#: What is Keras's own of an archive.
_OWN = "model.keras"


def _taken_from(file: Any, where: str, scratch: Path, *, own: bool = True) -> SavedTables:
    """The tables of an archive, taken out of it; and what is Keras's own of it. It would unpack all that it finds."""
    with zipfile.ZipFile(file, "r") as archive:
        tables = {info.filename for info in table_files.in_archive(archive)}
        table_files.from_archive(archive, scratch / FOLDER, where)
        if own:
            with zipfile.ZipFile(scratch / _OWN, "w") as rest:
                for info in archive.infolist():
                    if info.filename not in tables:
                        with archive.open(info) as source, rest.open(info.filename, "w", force_zip64=True) as target:
                            shutil.copyfileobj(source, target)
    return SavedTables(scratch / FOLDER, where)


def _load_weights_only(
    original: Callable[..., Any], model: Any, filepath: Any, skip_mismatch: bool = False, **kwargs: Any
) -> Any:
    """The weights of a ``.weights.h5`` or ``.keras`` file."""
    skipped = {id(one) for one in kwargs.get("objects_to_skip") or ()}
    held = [one for one in _to_load(model) if id(one.layer) not in skipped]
    where = f"'{filepath}'"
    if not held and not skipped and not _within.plain:
        _refuse_to_leave_out(model, filepath, where, skip_mismatch)
    if _within.plain or not held or not Path(filepath).exists():
        return original(model, filepath, skip_mismatch, **kwargs)
    with _scratch_beside(filepath) as scratch:
        if str(filepath).endswith(".keras"):
            saved = _taken_from(filepath, where, scratch, own=False) if _has_tables(filepath) else None
        elif str(filepath).endswith(".h5"):
            import h5py

            with h5py.File(filepath, "r") as opened:
                saved = _taken_from_hdf5(opened, where, scratch)
        else:
            saved = None
        pairs = _looked_at(saved, held, model, where, skip_mismatch)
        with _plain():
            returned = original(model, filepath, skip_mismatch, **kwargs)
        if saved is not None:
            _give(saved, pairs, model)
    return returned


def _refuse_to_leave_out(model: Any, path: Any, where: str, partial: bool) -> None:
    """Says so where a file has tables, and the model holds none."""
    there = False
    with contextlib.suppress(OSError, zipfile.BadZipFile):  # of which Keras tells
        if str(path).endswith(".keras"):
            there = _has_tables(path)
        elif str(path).endswith(".h5"):
            import h5py

            with h5py.File(path, "r") as opened:
                there = table_files.in_hdf5(opened)
    if there and not partial:
        raise ValueError(f"{where} has rows of tables, and {_name(model)} holds no table: nothing was loaded.")
    if there:
        warnings.warn(f"{where} has rows of tables, and {_name(model)} holds no table: skipped.", stacklevel=4)


def _taken_from_hdf5(group: Any, where: str, scratch: Path) -> SavedTables | None:
    if not table_files.in_hdf5(group):
        return None
    table_files.from_hdf5(group, scratch / FOLDER, where)
    return SavedTables(scratch / FOLDER, where)


def _looked_at(
    saved: SavedTables | None, held: list[HeldTable], model: Any, where: str, partial: bool, by_name: bool = False
) -> Any:
    """What goes where, before anything is loaded."""
    if saved is None:
        if partial or by_name:
            warnings.warn(f"{where} has no rows of {quoted(one.name for one in held)}: they stay.", stacklevel=4)
        else:
            _refuse_lacking(held, model, where)
        return []
    pairs, wrong = saved.matched(held, _name(model), by_name=by_name, partial=partial)
    for fault in wrong:
        warnings.warn(f"{fault}: skipped.", stacklevel=4)
    return pairs


def _load_model_from_hdf5(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An ``.h5`` file: its optimizer comes after its weights."""
    with _settled_later():
        return original(*args, **kwargs)


def _load_weights_from_hdf5(by_name: bool) -> Callable[..., Any]:
    """The weights in a group of an ``.h5`` file, with their tables."""

    def load(original: Callable[..., Any], group: Any, model: Any, skip_mismatch: bool = False, **kwargs: Any) -> Any:
        if skip_mismatch:
            kwargs["skip_mismatch"] = True
        held = _to_load(model)
        if not held:
            return original(group, model, **kwargs)
        where = f"'{group.file.filename}'"
        with _scratch_beside(group.file.filename) as scratch:
            saved = _taken_from_hdf5(group, where, scratch)
            pairs = _looked_at(saved, held, model, where, skip_mismatch, by_name)
            returned = original(group, model, **kwargs)
            if saved is not None:
                _give(saved, pairs, model)
        return returned

    return load


def _load_saved_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A SavedModel of tf_keras: rows come by what TensorFlow saves. Of most optimizers it restores no state."""
    model = original(*args, **kwargs)
    if not table_files.iterations_of(getattr(model, "optimizer", None)):
        for one in _to_load(model):
            for part in one.parts if one.eager else ():
                table_files.drop_restored_slots(part)
    return model


def _reduce(original: Callable[..., Any], model: Any) -> tuple[Any, ...]:
    """``__reduce__``, by which models are pickled: with the modules of layers of ours, which Keras does not import."""
    make, args, *state = original(model)
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else ()
    modules = {cls.__module__ for layer in layers for cls in type(layer).__mro__}
    ours = sorted(module for module in modules if module.partition(".")[0] == "tfplugin")
    return (unpickled, (ours, make, *args), *state) if ours else (make, args, *state)


def unpickled(modules: Sequence[str], make: Callable[..., Any], *args: Any) -> Any:
    """What `make` makes of a pickled model, once the modules of its layers are there."""
    for module in modules:
        importlib.import_module(module)
    return make(*args)


def _telling_of_spills(load: Callable[..., Any]) -> Callable[..., Any]:
    """The same; where a table has no folder here for its file, Keras says so at the end of pages."""

    def loaded(original: Callable[..., Any], file: Any, *args: Any, **kwargs: Any) -> Any:
        what = f"Loading '{file}'" if isinstance(file, (str, os.PathLike)) else "Loading the model"
        with naming_the_way_out(what):
            return load(original, file, *args, **kwargs)

    return loaded


# ---- Installing ------------------------------------------------------------------------------------------------------

_HDF5 = [
    ("save_model_to_hdf5", _save_model_to_hdf5),
    ("save_weights_to_hdf5_group", _save_weights_to_hdf5),
    ("load_model_from_hdf5", _load_model_from_hdf5),
    ("load_weights_from_hdf5_group", _load_weights_from_hdf5(by_name=False)),
    ("load_weights_from_hdf5_group_by_name", _load_weights_from_hdf5(by_name=True)),
]
_ARCHIVES = [
    ("save_model", _save_model),
    ("_save_model_to_fileobj", _save_to_object),
    ("save_weights_only", _save_weights_only),
    ("load_model", _load_model),
    ("_load_model_from_fileobj", _load_from_object),
    ("load_weights_only", _load_weights_only),
]

#: By the name of a Keras: its modules that write and read files, and what goes around their functions.
_AROUND: dict[str, list[tuple[str, list[tuple[str, Callable[..., Any]]]]]] = {
    "keras": [("keras.src.saving.saving_lib", _ARCHIVES), ("keras.src.legacy.saving.legacy_h5_format", _HDF5)],
    "tf_keras": [
        ("tf_keras.src.saving.saving_lib", _ARCHIVES),
        ("tf_keras.src.saving.legacy.hdf5_format", _HDF5),
        ("tf_keras.src.saving.legacy.save", [("save_weights", _save_weights)]),
        ("tf_keras.src.saving.legacy.saved_model.load", [("load", _load_saved_model)]),
    ],
}


def _changes(keras: Any) -> Iterator[Callable[[], None]]:
    """Wraps what a Keras has."""
    owner = defining_class(keras.Model, "__reduce__")
    if owner is not object:
        yield wrap_method(owner, "__reduce__", _reduce)
    for name, functions in _AROUND[keras.__name__]:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            for function, replacement in functions:
                if function in vars(module):
                    loads = function.lstrip("_").startswith("load")
                    yield wrap_method(module, function, _telling_of_spills(replacement) if loads else replacement)


_hooks = KerasHooks(_changes)
install, uninstall = _hooks.install, _hooks.uninstall
