"""Write models of nothing but tables, as SavedModels: what the exports are made of, and what they stand beside.

python -m exporting.table_models one ROWS DIM FOLDER       one table of random keys, and the same rows without keys
python -m exporting.table_models many TABLES ROWS DIM FOLDER    many tables, each looked up by the one signature

`one` writes FOLDER/ours, whose signature takes `ids`; and with --requests SIZES FOLDER/dense, a `tf.Variable` of the
same rows that `tf.gather` reads, and for each size requests, `keys-SIZE.npz` and `rows-SIZE.npz`: ids of the one and of
the other, drawn at random, which ask for the same rows. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

CHUNK = 1 << 20
REQUESTS = 16
"""Of each size: they take turns, so that none finds its rows in cache."""


def keys_of(rows: int) -> np.ndarray:
    """Keys without a pattern, none twice."""
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, rows + rows // 100 + 16))
    rng.shuffle(keys)
    return keys[:rows]


def one_table(rows: int, dim: int, folder: Path, sizes: list[int]) -> None:
    """A table, and the same rows without keys."""
    import quiet_tensorflow  # noqa: F401  (before TensorFlow)
    import tensorflow as tf

    import tfplugin

    class Ours(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = tfplugin.get_kv_variable("emb", embedding_dim=dim)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
        def lookup(self, ids: Any) -> Any:
            return {"embeddings": tf.nn.embedding_lookup(self.table, ids)}

    class Dense(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = tf.Variable(tf.zeros([rows, dim]))

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
        def lookup(self, ids: Any) -> Any:
            return {"embeddings": tf.gather(self.table, ids)}

    keys = keys_of(rows)
    rng = np.random.default_rng(1)
    ours, dense = Ours(), Dense() if sizes else None
    for start in range(0, rows, CHUNK):
        chunk = keys[start : start + CHUNK]
        values = rng.random((len(chunk), dim), np.float32)
        ours.table.upsert(tf.constant(chunk), tf.constant(values))
        if dense is not None:
            dense.table.scatter_update(tf.IndexedSlices(values, np.arange(start, start + len(chunk))))
    with tfplugin.inference_mode():
        tf.saved_model.save(ours, str(folder / "ours"), signatures=ours.lookup)
    if dense is not None:
        tf.saved_model.save(dense, str(folder / "dense"), signatures=dense.lookup)
    for size in sizes:
        drawn = rng.integers(0, rows, REQUESTS * size)
        np.savez(folder / f"keys-{size}.npz", ids=keys[drawn])
        np.savez(folder / f"rows-{size}.npz", ids=drawn)


def many_tables(tables: int, rows: int, dim: int, folder: Path) -> None:
    """A model that looks ids up in all its tables at once and adds the rows up."""
    import quiet_tensorflow  # noqa: F401  (before TensorFlow)
    import tensorflow as tf

    import tfplugin

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = [tfplugin.get_kv_variable(f"emb_{number}", embedding_dim=dim) for number in range(tables)]

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
        def lookup(self, ids: Any) -> Any:
            return {"sum": tf.add_n([tf.nn.embedding_lookup(table, ids) for table in self.tables])}

    model, rng = Model(), np.random.default_rng(0)
    for table in model.tables:
        table.upsert(tf.range(rows, dtype=tf.int64), tf.constant(rng.random((rows, dim), np.float32)))
    with tfplugin.inference_mode():
        tf.saved_model.save(model, str(folder / "ours"), signatures=model.lookup)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one, many = kinds.add_parser("one"), kinds.add_parser("many")
    one.add_argument("rows", type=int)
    many.add_argument("tables", type=int)
    many.add_argument("rows", type=int)
    for kind in (one, many):
        kind.add_argument("dim", type=int)
        kind.add_argument("folder", type=Path)
    one.add_argument("--requests", type=int, nargs="+", default=[])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.kind == "one":
        one_table(options.rows, options.dim, options.folder, options.requests)
    else:
        many_tables(options.tables, options.rows, options.dim, options.folder)
    print(json.dumps({}), flush=True)


if __name__ == "__main__":
    main()
