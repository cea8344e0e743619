"""What TensorFlow 2.21 has and 2.16 has not, and keeps the older one from opening a model: `later_ops.txt`.

An attribute that an operation has got since then is left out where it says what the operation always did. What is
left is told.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from kvtools.lookup_model.messages import INT32, of_bool, of_text, of_type
from kvtools.stock_model.graph_def import Node

OLDEST = "2.16"
"""The oldest TensorFlow that exports are tested with."""

_LIST = Path(__file__).with_name("later_ops.txt")

_SCATTERS = (
    "GatherNd",
    "ResourceScatterNdAdd",
    "ResourceScatterNdMax",
    "ResourceScatterNdMin",
    "ResourceScatterNdSub",
    "ResourceScatterNdUpdate",
    "ScatterNd",
    "ScatterNdAdd",
    "ScatterNdMax",
    "ScatterNdMin",
    "ScatterNdNonAliasingAdd",
    "ScatterNdSub",
    "ScatterNdUpdate",
    "TensorScatterAdd",
    "TensorScatterMax",
    "TensorScatterMin",
    "TensorScatterSub",
    "TensorScatterUpdate",
)
_LATER_ATTRIBUTES = {
    **{(op, "bad_indices_policy"): of_text("") for op in _SCATTERS},
    ("BatchFunction", "batch_padding_policy"): of_text("PAD_UP"),
    ("BatchFunction", "mixed_priority_policy"): of_text("low_priority_padding_with_max_batch_size"),
    ("MapDataset", "force_synchronous"): of_bool(False),
    ("ParallelMapDatasetV2", "use_unbounded_threadpool"): of_bool(False),
    ("TensorListGetItem", "Tshape"): of_type(INT32),
    ("XlaCallModule", "use_shardy_partitioner"): of_bool(False),
}
"""The attributes that they brought -> what says that all is as it was."""


@functools.cache
def later_operations() -> frozenset[str]:
    """Return the names of the operations that 2.17 to 2.21 brought."""
    return frozenset(_LIST.read_text("ascii").split())


def for_older(node: Node) -> dict[str, bytes]:
    """Return the attributes of a node without later ones that change nothing.

    >>> list(for_older(Node("n", "ScatterNd", [], {"T": of_type(INT32), "bad_indices_policy": of_text("")})))
    ['T']
    """
    return {key: value for key, value in node.attributes.items() if _LATER_ATTRIBUTES.get((node.op, key)) != value}


def not_in_oldest(nodes: Iterable[Node]) -> dict[str, str]:
    """Return what of some nodes `OLDEST` has not, operations and attributes, with the name of a node."""
    found: dict[str, str] = {}
    for node in nodes:
        if node.op in later_operations():
            found.setdefault(f"operation '{node.op}'", node.name)
        for attribute in node.attributes:
            if (node.op, attribute) in _LATER_ATTRIBUTES:
                found.setdefault(f"attribute '{attribute}' of operation '{node.op}'", node.name)
    return found
