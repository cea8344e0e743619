"""A tensor of a bundle as a table's column, checked against what the dialect says it must be."""

from __future__ import annotations

from collections.abc import Collection

from kvtools.dialects.bundle import Bundle, BundleTensor
from kvtools.errors import CorruptFileError


def bundle_column(
    bundle: Bundle,
    doing: str,
    name: str,
    dtypes: Collection[str],
    row_shape: tuple[int | None, ...] = (),
    rows: int | None = None,
) -> BundleTensor:
    """Return tensor `name` as a column.

    Args:
        bundle: where it is.
        doing: how a message begins, as in "opening table 'emb' of 'model.ckpt'".
        name: the tensor.
        dtypes: the types that it may have.
        row_shape: the shape of its rows, None for any number but 0.
        rows: how many rows it must have, None if any.

    Raises:
        CorruptFileError: it is not there, or of another type or shape.
    """
    if name not in bundle:
        raise CorruptFileError(
            f"{doing}: tensor '{name}' is missing; the checkpoint was written in part, write it again"
        )
    tensor = bundle.tensor(name)
    if tensor.dtype.name not in dtypes:
        raise CorruptFileError(
            f"{doing}: tensor '{name}' is of type {tensor.dtype.name}, expected {' or '.join(sorted(dtypes))};"
            " write the checkpoint again"
        )
    fits = (
        len(tensor.shape) == 1 + len(row_shape)
        and rows in (None, tensor.rows)
        and all(got > 0 if want is None else got == want for got, want in zip(tensor.row_shape, row_shape, strict=True))
    )
    if not fits:
        expected = ["any" if size is None else size for size in (rows, *row_shape)]
        raise CorruptFileError(
            f"{doing}: tensor '{name}' has shape {list(tensor.shape)}, expected [{', '.join(map(str, expected))}] as"
            " its table's other tensors say; the checkpoint was written in part, write it again"
        )
    return tensor
