"""A click log in the shape of Criteo's, with a planted signal: 26 sparse and 13 dense features. NumPy only, seeded.

`criteo_log` gives arrays; `write_tsv` a file as Criteo gives it away (train.txt of the Display Advertising Challenge):
a line for each impression, of 40 fields with tabs between them: 0 or 1, 13 integers, 26 values in eight hexadecimal
digits. A field may be empty.

Ids of a feature follow a Zipf law over its own number of values, from tens to a million, and are 64-bit hashes that no
two features share. Clicks depend on weights of the ids, on pairs of features that like each other, and on the dense
features; so a model with a row per id can learn what a model without cannot.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from click_log import Examples, mix, planted

SPARSE_FEATURES = 26
DENSE_FEATURES = 13
#: How many values each sparse feature takes.
CARDINALITIES = tuple(int(n) for n in np.geomspace(20, 1_000_000, SPARSE_FEATURES))

_ZIPF = 1.05
_TASTES = 2
_PAIRS = 8  # of features that like each other


def criteo_log(seed: int, examples: int) -> Examples:
    """`examples` impressions; its `ids` holds one array, [examples, SPARSE_FEATURES], under the name ``all``.

    Different seeds are different days: what makes people click stays.
    """
    rng = np.random.default_rng(seed)
    ids = np.stack([_ids(feature, examples, rng) for feature in range(SPARSE_FEATURES)], axis=1)
    dense = rng.lognormal(0.0, 1.0, (examples, DENSE_FEATURES)).astype(np.float32)
    dense = np.log1p(dense)  # as everybody does with Criteo's counts

    logit = -1.5 + 0.25 * (dense @ np.linspace(-1, 1, DENSE_FEATURES, dtype=np.float32))
    for feature in range(SPARSE_FEATURES):
        logit = logit + 0.35 * planted(ids[:, feature], "level", 1)[:, 0]
    tastes = [planted(ids[:, feature], "tastes", _TASTES) for feature in range(2 * _PAIRS)]
    for pair in range(_PAIRS):
        logit = logit + 0.3 * (tastes[2 * pair] * tastes[2 * pair + 1]).sum(axis=1) / np.sqrt(_TASTES)
    probability = 1 / (1 + np.exp(-logit))
    clicks = (rng.random(examples) < probability).astype(np.float32)
    return Examples(ids={"all": ids}, dense=dense, clicks=clicks, probability=probability)


@functools.cache
def _cumulative(values: int) -> np.ndarray:
    return np.cumsum(np.arange(1, values + 1, dtype=np.float64) ** -_ZIPF)


def _ids(feature: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Hashes of (feature, rank): int64 [n]."""
    cumulative = _cumulative(CARDINALITIES[feature])
    rank = np.searchsorted(cumulative, rng.random(n) * cumulative[-1]).astype(np.uint64)
    return mix(rank + (np.uint64(feature + 1) << np.uint64(48))).view(np.int64)


_EMPTY = 0.02  # of the fields of a file


def write_tsv(path: Path, seed: int, examples: int) -> Examples:
    """Writes `examples` lines to `path`, and returns what they were made of."""
    log, rng = criteo_log(seed, examples), np.random.default_rng(seed)
    counts = np.round(10 * np.expm1(log.dense)).astype(np.int64)
    columns = [log.clicks.astype(np.int64).astype(str), *(column.astype(str) for column in counts.T)]
    for column in log.ids["all"].T:
        values, where = np.unique(column, return_inverse=True)
        columns.append(np.array([f"{value >> 32 & 0xFFFFFFFF:08x}" for value in values.tolist()])[where])
    for column in columns[1:]:
        column[rng.random(examples) < _EMPTY] = ""
    with path.open("w") as file:
        file.writelines("\t".join(line) + "\n" for line in zip(*(column.tolist() for column in columns), strict=True))
    return log
