"""`kvtools scan`: the rows within a range of keys."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtools.cli.options import DEFAULT_MEMORY, Memory, Source, SourcePath, Tables, Where
from kvtools.cli.row_output import RowForms, tables_for
from kvtools.cli.scan_rows import print_scan
from kvtools.errors import UsageError
from kvtools.key_file import check_range, is_integer
from kvtools.row_filter import condition_of
from kvtools.scan import KeyRange, order_named


def run(
    path: SourcePath,
    *,
    first: Annotated[
        str | None, typer.Option("--from", metavar="KEY", help="The smallest key; from the first on if left out.")
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to", metavar="KEY", help="The largest key, itself shown; to the last if left out.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("-n", "--limit", metavar="N", help="Of each table only the first N rows.")
    ] = None,
    order: Annotated[
        str, typer.Option("--order", metavar="key|stream", help="By key, or as the rows lie, which takes less time.")
    ] = "key",
    where: Where = None,
    table: Tables = None,
    output_dialect: Annotated[
        str | None,
        typer.Option("--output-dialect", metavar="DIALECT", help="The dialect of OUT, if its name does not tell."),
    ] = None,
    forms: RowForms,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
) -> None:
    """Print the rows whose keys are from --from to --to, both of them included, in the order of the keys.

    Forms are those of `kvtools get`. Exits with 3 where no row is in the range; what is printed or written
    is whole all the same.

    \b
    Examples:
      kvtools scan model.ckpt-100 --from -5 --to 100
      kvtools scan model.ckpt-100 --table user_emb --limit 20 --columns freq,norm
      kvtools scan model.ckpt-100 --table user_emb --order stream --csv > rows.csv
      kvtools scan model.ckpt-100 --from 10 --where 'freq > 10' --table user_emb --output some.parquet
    """
    target = forms.target(output_dialect, option="--output-dialect")
    keys = KeyRange(_key("--from", first), _key("--to", last))
    in_order = order_named(order)
    if limit is not None and limit < 0:
        raise UsageError(f"reading a range of keys: got --limit {limit}, expected 0 or more")
    condition = condition_of(where)
    checkpoint = source.open_for(table or [], path, memory)
    forms.check_place(target, [checkpoint.path])
    tables = checkpoint.select(table or [])
    if condition is not None:
        tables = tables_for(tables, [condition.columns_of], table)
    choice = forms.choice(tables, target)
    print_scan(tables, forms, choice, target, memory, keys=keys, order=in_order, limit=limit, where=condition)


def _key(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    check_range(text, f"reading a range of keys: got {option} {text[:40]}")
    if not is_integer(text):
        raise UsageError(f"reading a range of keys: got {option} {text[:40]!r}, expected a whole number")
    return int(text)
