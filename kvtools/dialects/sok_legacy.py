"""What SparseOperationKit 1 saves (`sok.Saver`): a folder of `<variable>_keys.file` and `<variable>_values.file`.

Both are native-endian numbers without a header: int64 or uint32 keys, and float32 rows in the same order. Neither a
type nor the width of a row is recorded; see `docs/dialects/sok-legacy.md` for how they are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from kvtools.dialects.chunk import Array
from kvtools.dialects.column import RawColumn
from kvtools.dialects.column_table import ColumnTable, Part
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.raw_output import RawTableWriter, create_column, named_after_table
from kvtools.dialects.schema import TableSchema, numpy_dtype
from kvtools.dialects.writing import CheckpointWriter, WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, UsageError

NAME = "sok-legacy"
KEY_DTYPES = ("int64", "uint32")
VALUE_DTYPES = ("float32",)

KEYS_FILE, VALUES_FILE = "_keys.file", "_values.file"
_OTHER_KEY_DTYPES = ("int32", "uint64")  # never written by it, taken if asked for
_OTHER_VALUE_DTYPES = ("float16", "float64")


def sniff(source: Source) -> bool:
    """Tell whether a source is a folder with such files, or one of them."""
    return any(name.endswith((KEYS_FILE, VALUES_FILE)) for name in _folder(source).names)


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the variables that a folder has files of.

    Raises:
        BadInputError: one of a variable's two files is missing.
        CorruptFileError: the files' sizes fit no types and width.
        UsageError: an option names a type that there is not, or contradicts the sizes.
    """
    files, folder = _folder(source).names, _folder(source).path
    names = sorted({file.removesuffix(end) for file in files for end in (KEYS_FILE, VALUES_FILE) if file.endswith(end)})
    tables: dict[str, TableReader] = {}
    broken: dict[str, KvtoolsError] = {}
    for name in names:
        try:
            tables[name] = open_table(folder, name, options)
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[name] = error
    return Checkpoint(folder, NAME, tables, broken=broken)


def _folder(source: Source) -> Source:
    """Return the folder of a source that is one of the files, else the source itself."""
    one = not source.is_url and source.path.is_file() and source.path.name.endswith((KEYS_FILE, VALUES_FILE))
    return Source(str(source.path.parent)) if one else source


def open_table(folder: Path, name: str, options: OpenOptions) -> ColumnTable:
    """Open the files of one variable; raises as `open_checkpoint` does."""
    doing = f"opening table '{name}' of '{folder}'"
    paths = (folder / f"{name}{KEYS_FILE}", folder / f"{name}{VALUES_FILE}")
    for path in paths:
        if not path.is_file():
            raise BadInputError(f"{doing}: there is no '{path.name}'; copy both files of the variable")
    key_bytes, value_bytes = (path.stat().st_size for path in paths)
    value_dtype = _option("--value-dtype", options.value_dtype, VALUE_DTYPES + _OTHER_VALUE_DTYPES) or "float32"
    wanted = _option("--key-dtype", options.key_dtype, KEY_DTYPES + _OTHER_KEY_DTYPES)
    itemsize = numpy_dtype(value_dtype).itemsize
    sizes = f"'{paths[0].name}' has {key_bytes} bytes and '{paths[1].name}' {value_bytes}"

    def width(key_dtype: str) -> int | None:
        """Return the width of a row if the keys are of this type, None where the sizes contradict it."""
        rows, rest = divmod(key_bytes, numpy_dtype(key_dtype).itemsize)
        if rest or value_bytes % itemsize:
            return None
        if rows == 0:
            return (options.dim or 1) if value_bytes == 0 else None
        dim, rest = divmod(value_bytes // itemsize, rows)
        return None if rest or dim == 0 or (options.dim or dim) != dim else dim

    possible = {key_dtype: dim for key_dtype in ([wanted] if wanted else KEY_DTYPES) if (dim := width(key_dtype))}
    if not possible:
        if wanted or options.dim or options.value_dtype:
            said = f"{wanted or 'int64 or uint32'} keys and rows of {options.dim or 'any number of'} {value_dtype}"
            raise UsageError(f"{doing}: {sizes}, which cannot be {said}; change --key-dtype, --value-dtype or --dim")
        raise CorruptFileError(
            f"{doing}: {sizes}, which is no number of int64 or uint32 keys with as many {value_dtype} rows; the files"
            " are truncated, or of other types: see --key-dtype, --value-dtype and --dim"
        )
    key_dtype, dim = next(iter(possible.items()))
    rows = key_bytes // numpy_dtype(key_dtype).itemsize
    notes = []
    if rows == 0 and not options.dim:
        notes.append("it has no rows to tell its width: taken as 1; --dim says another")
    if not wanted:
        others = "".join(f"; {other} keys with rows of {d} would fit too" for other, d in [*possible.items()][1:])
        notes.append(f"the format records no types: keys taken as {key_dtype} with rows of {dim}{others}")
    if not options.value_dtype:
        notes.append("the format records no types: values taken as float32")
    schema = TableSchema(
        name=name,
        dialect=NAME,
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        dim=dim,
        part_rows=(rows,),
        notes=tuple(notes),
        bytes=key_bytes + value_bytes,
    )
    keys = RawColumn(paths[0], numpy_dtype(key_dtype), rows=rows)
    values = RawColumn(paths[1], numpy_dtype(value_dtype), (dim,), rows=rows)
    return ColumnTable(schema, [Part(rows, keys, values)])


def _option(option: str, value: str | None, known: tuple[str, ...]) -> str | None:
    if value is not None and value not in known:
        raise UsageError(f"reading {NAME} files: got {option} {value}, expected one of {', '.join(known)}")
    return value


class Writer(CheckpointWriter):
    """Writes such files to a folder."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        self._folder = Path(staging)

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> RawTableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        doing = f"writing table '{schema.name}' as {NAME}"
        if "/" in schema.name:
            raise UsageError(
                f"{doing}: its name has a '/', expected one that can stand in a file name; rename it first, see"
                " `kvtools rename`"
            )
        places = (
            ("keys", KEYS_FILE, schema.key_dtype, (schema.rows,)),
            ("values", VALUES_FILE, schema.value_dtype, (schema.rows, schema.dim)),
        )
        regions = {}
        for place, suffix, dtype, shape in places:
            path = self._folder / f"{schema.name}{suffix}"
            with named_after_table(doing, path.name):
                regions[place] = create_column(path, b"", numpy_dtype(dtype), shape)
        return RawTableWriter(regions)

    def close(self) -> None:
        """Finish; the files are whole already."""


DIALECT = Dialect(
    name=NAME,
    title="files of SparseOperationKit 1 (sok.Saver): <variable>_keys.file and <variable>_values.file",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="folder",
    holds=Holds(key_dtypes=KEY_DTYPES, value_dtypes=VALUE_DTYPES, slots=False, many_parts=False, empty_dim=False),
)
