"""A click log with a planted signal, for the examples: NumPy only, endless, and the same for the same seed.

Users, items and contexts come from an open vocabulary: nobody knows how many there are, new ones never stop coming,
and an id is a 64-bit hash, negative half of the time. What makes people click is a function of the ids, so a model
with a row per id can learn it, and a model without can not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

#: The sparse features. An id says which feature it belongs to by its hash alone: no two features share ids.
FEATURES = ("user", "item", "category", "context")
#: The dense features: place on the page, price, and the hour as a point on a circle.
DENSE_FEATURES = 4

_TASTES = 4  # What a user likes in an item.


@dataclass(frozen=True)
class Examples:
    """A batch of n impressions."""

    ids: dict[str, np.ndarray]  # feature -> int64 [n]
    dense: np.ndarray  # float32 [n, DENSE_FEATURES]
    clicks: np.ndarray  # float32 [n], 0 or 1
    probability: np.ndarray  # float64 [n], of a click: what no model can know better than


def click_log(seed: int, batch: int) -> Iterator[Examples]:
    """Yields batches without end. Different seeds are different days at the same shop: the tastes stay."""
    rng = np.random.default_rng(seed)
    while True:
        yield _impressions(rng, batch)


def _impressions(rng: np.random.Generator, n: int) -> Examples:
    # Ranks with a Zipf-like tail that has no end: half of all traffic goes to the first `scale` of them.
    user = _ids("user", (3000 * rng.pareto(1.0, n)).astype(np.uint64))
    item = _ids("item", (600 * rng.pareto(1.0, n)).astype(np.uint64))
    category = _ids("category", mix(item.view(np.uint64)) % np.uint64(200))
    context = _ids("context", (2000 * rng.pareto(0.9, n)).astype(np.uint64))
    place, price, hour = rng.random(n), rng.lognormal(0.0, 0.5, n), rng.uniform(0, 2 * np.pi, n)

    # Users and items have a level of their own, users like some kinds of items, and one context in ten matters.
    likes = (planted(user, "likes", _TASTES) * _item_kind(item, category)).sum(1) / np.sqrt(_TASTES)
    matters = np.abs(planted(context, "matters", 1)[:, 0]) > 0.9 * np.sqrt(3)
    logit = (
        -1.5
        + 0.7 * planted(user, "level", 1)[:, 0]
        + 0.6 * planted(item, "level", 1)[:, 0]
        + 1.2 * likes
        + 1.0 * matters * planted(context, "level", 1)[:, 0]
        - 1.0 * (place - 0.5)
        - 0.4 * np.log(price)
        + 0.3 * np.sin(hour)
    )
    probability = 1 / (1 + np.exp(-logit))
    return Examples(
        ids={"user": user, "item": item, "category": category, "context": context},
        dense=np.stack([place, price, np.sin(hour), np.cos(hour)], axis=1).astype(np.float32),
        clicks=(rng.random(n) < probability).astype(np.float32),
        probability=probability,
    )


def _item_kind(item: np.ndarray, category: np.ndarray) -> np.ndarray:
    return 0.8 * planted(category, "kind", _TASTES) + 0.6 * planted(item, "kind", _TASTES)


def _ids(feature: str, rank: np.ndarray) -> np.ndarray:
    """64-bit hashes of (feature, rank): int64."""
    return mix(rank + (np.uint64(FEATURES.index(feature)) << np.uint64(56))).view(np.int64)


def planted(ids: np.ndarray, what: str, width: int) -> np.ndarray:
    """The truth about ids, [n, width]: mean 0, variance 1, a pure function of the id."""
    salt = np.uint64(int.from_bytes(what.encode()[:8], "little"))
    columns = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = mix(mix(ids.view(np.uint64) ^ salt)[:, None] + columns)
    return ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5) * np.sqrt(12)


def mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: scrambles 64 bits, one to one."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def auc(clicks: np.ndarray, score: np.ndarray) -> float:
    """Area under the ROC curve: how often a clicked example scores above one that was not; ties count half."""
    _, rank_of, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[rank_of]
    positive = clicks > 0.5
    n, m = positive.sum(), (~positive).sum()
    return float((rank[positive].sum() - n * (n + 1) / 2) / (n * m))


def auc_of_dense(seen: Examples, held_out: Examples) -> float:
    """AUC on `held_out` of a linear model of the dense features alone: what can be known without a row for each id."""
    columns = [
        np.concatenate([one.dense, np.log(one.dense[:, 1:2]), np.ones((len(one.dense), 1))], 1)
        for one in (seen, held_out)
    ]
    weights, *_ = np.linalg.lstsq(columns[0], seen.clicks, rcond=None)
    return auc(held_out.clicks, columns[1] @ weights)
