"""Files under the names that examples in `--help` use, for what runs commands as they stand there.

`lay_out(folder, text)` makes those that a text mentions. A new name gets a function in `PIECES`.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import chain_writer
import numpy as np
from chain_writer import ChainWriter

import kvtools
from kvtools.array_table import ArrayTable
from kvtools.cli.main import main
from kvtools.dialects.bundle import BundleWriter
from kvtools.migrate import write_tables

DATA = Path(__file__).resolve().parent.parent / "data"
MOMENT = 1_760_000_000
TABLES = {"user_emb": (40, 8), "item_emb": (25, 4)}
"""Rows and width of each table; keys begin at -3, so that -3 and 17 are there."""


def model(
    prefix: Path,
    *,
    seed: int = 100,
    first: int = -3,
    tables: Mapping[str, tuple[int, int]] = TABLES,
    slots: tuple[str, ...] = ("Adam.m", "Adam.v"),
) -> None:
    """Write a checkpoint in our layout: two tables in two parts with slots, frequencies and times; two variables."""
    rng = np.random.default_rng(seed)
    made = []
    for name, (count, dim) in tables.items():
        values = rng.normal(0, 0.1, (count, dim)).astype(np.float32).round(3)
        values[1] = 0
        made.append(
            ArrayTable(
                name,
                np.arange(count) + first,
                values,
                slots={slot: np.abs(values * 0.5) if slot == "Adam.v" else values * 0.5 for slot in slots},
                freqs=(1 + np.arange(count)[::-1] ** 2).astype(np.uint32),
                versions=(MOMENT - 86_400 * np.arange(count)).astype(np.uint32),
                version_unit="seconds",
                part_rows=[count],
            )
        )
    write_tables(made, prefix, "tfplugin", beside=kvtools.open(DATA / "sample"), parts=2)


POLICY = """\
[[tables]]
name = "user_emb"
min-freq = 100
dtype = "int8"
max-capacity = 20
eviction = "lfu"
admission = { count = 2 }
"""


def _checkpoint(name: str, **more: object) -> Callable[[Path], None]:
    return lambda folder: model(folder / name, **more)  # type: ignore[arg-type]


def _chain(folder: Path) -> None:
    """Write the chain `train`: a full checkpoint, ckpt-4, and increments up to ckpt-17.delta."""
    with (
        mock.patch.object(chain_writer.time, "time", lambda: float(MOMENT)),
        mock.patch.object(chain_writer.uuid, "uuid4", lambda: uuid.UUID(int=7)),
    ):
        chain = ChainWriter(folder / "train", {"user_emb": 3})
        chain.put("user_emb", range(20), 1.0)
        chain.number = 3
        chain.full()
        for step in range(5, 18):
            chain.put("user_emb", range(step, step + 3), step)
            chain.remove("user_emb", [step + 30])
            chain.put("user_emb", [step + 31], 0.5)
            chain.increment()


def _run(folder: Path, *arguments: str) -> None:
    words = [str(folder / word[1:]) if word.startswith("@") else word for word in arguments]
    assert main([*words, "-q"]) == 0, arguments


def _merged(name: str, *options: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _piece(folder, "train")
        _run(folder, "merge", "@train", f"@{name}", *options)

    return make


def _delta(folder: Path) -> None:
    beside = folder / "of-the-delta"
    beside.mkdir()
    for name in ("monday.ckpt", "tuesday.ckpt"):
        _piece(beside, name)
    _run(beside, "diff", "@monday.ckpt", "@tuesday.ckpt", "--output", "delta", "@tuesday.delta")
    for file in beside.glob("tuesday.delta.*"):
        file.rename(folder / file.name)
    shutil.rmtree(beside)


def _deeprec(folder: Path) -> None:
    """Write a full checkpoint of DeepRec, full.ckpt-100, and an increment of it."""
    from test_deeprec import increment, variable

    (folder / ".incremental_checkpoint").mkdir()
    for name, tensors in (
        ("full.ckpt-100", variable("emb", [2, 4, 6])),
        (".incremental_checkpoint/incr.ckpt-110", increment("emb", [4, 8])),
    ):
        with BundleWriter(folder / name) as writer:
            for tensor, array in tensors.items():
                writer.array(tensor, array)


def _of_model(*arguments: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _piece(folder, "model.ckpt-100")
        _run(folder, *arguments)

    return make


def _bad(folder: Path) -> None:
    """Write a checkpoint with a NaN, an infinity in a slot, and a key that stands twice."""
    rng = np.random.default_rng(1)
    keys = np.array([0, 2, 4, 2, 1, 3, 5])
    values, slot = rng.normal(0, 0.1, (2, len(keys), 4)).astype(np.float32).round(3)
    values[2, 1], slot[5, 0] = np.nan, np.inf
    table = ArrayTable("user_emb", keys, values, slots={"Adam.m": slot}, part_rows=[4, 3], partition="floor_mod")
    write_tables([table], folder / "bad.ckpt-100", "tfplugin")


def _damaged(folder: Path) -> None:
    """Write a checkpoint in which a byte of the values of a part of user_emb has changed."""
    model(folder / "damaged.ckpt-100")
    values = next(kvtools.open(folder / "damaged.ckpt-100").table("user_emb").chunks(part=1)).values
    assert values is not None
    data = folder / "damaged.ckpt-100.data-00000-of-00001"
    changed = bytearray(data.read_bytes())
    changed[changed.index(values.tobytes()) + 5] ^= 0x10
    data.write_bytes(changed)


def _text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _log(folder: Path) -> None:
    """Write a log of 500 examples, whose ids are seldom the larger ones."""
    import pyarrow
    from pyarrow import parquet

    rng = np.random.default_rng(5)
    users, items = (rng.zipf(1.4, 500) % 60 - 3 for _ in range(2))
    columns = {"user_emb": users, "item_emb": items, "user_id": users[::-1].copy(), "clicked": rng.random(500) < 0.3}
    parquet.write_table(pyarrow.table({**columns, "timestamp": MOMENT + np.arange(500)}), folder / "ids.parquet")


def _numbers(name: str, numbers: list[int]) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / name, np.array(numbers, np.int64))


PIECES: dict[str, Callable[[Path], None]] = {
    "model.ckpt-100": _checkpoint("model.ckpt-100"),
    "model.ckpt-200": _checkpoint("model.ckpt-200", seed=200),
    "model.ckpt-300": _checkpoint("model.ckpt-300", seed=300),
    **{f"rank{rank}.ckpt": _checkpoint(f"rank{rank}.ckpt", first=1000 * rank) for rank in range(3)},
    "a.ckpt": _checkpoint("a.ckpt"),
    "b.ckpt": _checkpoint("b.ckpt", seed=200),
    "towers.ckpt": _checkpoint("towers.ckpt", tables={"users": (25, 4), "items": (30, 4)}),
    "full.ckpt-100": _deeprec,
    "train": _chain,
    "monday.ckpt": _merged("monday.ckpt", "--until", "16"),
    "tuesday.ckpt": _merged("tuesday.ckpt"),
    "tuesday.delta": _delta,
    "tables.h5": _of_model("migrate", "@model.ckpt-100", "@tables.h5"),
    "exported": _of_model("export", "@model.ckpt-100", "--savedmodel", "@exported"),
    "model.kvsnap": _of_model("export", "@model.ckpt-100", "--snapshot", "@model.kvsnap"),
    "shards": _of_model("split", "@model.ckpt-100", "@shards", "--by", "mod:2"),
    "renamed.ckpt": _of_model("rename", "@model.ckpt-100", "@renamed.ckpt", "--table", "user_emb=towers/user"),
    "bad.ckpt-100": _bad,
    "ids.txt": _text("ids.txt", "key\n17 # the first\n-3\n"),
    "vip.txt": _text("vip.txt", "17\n-3\n"),
    "ids.npy": _numbers("ids.npy", [17, -3]),
    "clicks.tsv": _text("clicks.tsv", "17\tad\n-3\tad\n"),
    "banned.tsv": _text("banned.tsv", "17\tbot\n"),
    "query.npy": lambda folder: np.save(folder / "query.npy", np.ones(4, np.float32)),
    "damaged.ckpt-100": _damaged,
    "sok_dump": lambda folder: shutil.copytree(DATA / "sok", folder / "sok_dump") and None,
    "thresholds.toml": _text("thresholds.toml", '[[tables]]\nname = "*"\nmin-freq = 2\n'),
    "policy.toml": _text("policy.toml", POLICY),
    "ids.csv": _text("ids.csv", "user_id\n17\n-3\n17\n"),
    "ids.parquet": _log,
    "rank:score": _text("rank.py", "def score(rows):\n    return sum(row.sum(axis=1) for row in rows.values())\n"),
}
"""What makes each file or folder, in the folder that it is given."""


def _piece(folder: Path, name: str) -> None:
    if not (folder / name).exists() and not list(folder.glob(f"{name}.*")):
        PIECES[name](folder)


def lay_out(folder: Path, text: str, *, without: frozenset[str] = frozenset()) -> None:
    """Make the files that a text mentions, but not those of `without`, which it writes itself."""
    for name in PIECES:
        if name not in without and re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", text):
            _piece(folder, name)
