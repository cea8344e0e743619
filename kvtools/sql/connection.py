"""Connections to DuckDB that can do nothing but compute: no files, no network, no extensions, no settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtools.errors import MissingDependencyError, check_working_folder

_LOCKED = {
    "allow_community_extensions": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "enable_external_access": "false",
    # Or a table's name that is not there would be looked for among the variables of whoever called.
    "python_enable_replacements": "false",
}


def import_duckdb(doing: str) -> Any:
    """Return the module duckdb; raises `MissingDependencyError` where it is not installed."""
    try:
        import duckdb
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):
            raise MissingDependencyError(f"{doing}: duckdb is installed and cannot be imported: {error}") from error
        raise MissingDependencyError(
            f"{doing}: queries need duckdb, which is not installed; run `pip install 'kvtools[sql]'`"
        ) from None
    return duckdb


def connect(doing: str, *, memory: int, threads: int = 1, spill: Path | None = None) -> Any:
    """Return a connection to an empty database in memory, without access to anything outside; `lock` it before use.

    Args:
        doing: what messages say was being done.
        memory: the bytes that DuckDB may hold.
        threads: how many threads it computes with.
        spill: a folder for what does not fit in memory, used as it is needed; nowhere if None.

    Raises:
        MissingDependencyError: duckdb is not installed.
        BadInputError: the working folder was removed.
    """
    duckdb = import_duckdb(doing)
    check_working_folder()  # without one DuckDB ends the process
    config = {
        **_LOCKED,
        "memory_limit": f"{max(memory, _LEAST_MEMORY)}B",
        "temp_directory": "" if spill is None else str(spill),
        "threads": threads,
    }
    return duckdb.connect(":memory:", config=config)


_LEAST_MEMORY = 32 << 20
"""Below this DuckDB cannot sort or join at all, wherever it may spill to."""


def lock(connection: Any) -> None:
    """Let no statement change a setting of a connection any more."""
    connection.execute("set lock_configuration = true")


def quoted(name: str) -> str:
    '''Return a name as SQL writes one, whatever is in it.

    >>> quoted('say "hi"')
    '"say ""hi"""'
    '''
    return '"' + name.replace('"', '""') + '"'


def first_line(error: Exception) -> str:
    """Return what DuckDB says is wrong, without its picture of the place."""
    return " ".join(str(error).split("\nLINE ")[0].split())


def wider_hint(error: Exception, column: str) -> str:
    """Return the way out where a number does not fit its type, as of a `column`; "" for other errors.

    >>> wider_hint(ValueError("Overflow in multiplication of INT64 (3 * 9)"), "key")
    '; cast it: key::hugeint'
    """
    return f"; cast it: {column}::hugeint" if "overflow" in str(error).casefold() else ""
