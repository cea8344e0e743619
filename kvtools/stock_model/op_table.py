"""What each operation becomes, by its name. An operation of another engine is a line in `OPERATIONS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtools.stock_model import deeprec_ops, exchange_ops, plain_ops, pooled_ops, tfplus_ops, tfra_ops
from kvtools.stock_model.attributes import Attributes
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.plain_ops import Call

Outputs = Callable[[Attributes], Sequence[tuple[str, int]]]


@dataclass(frozen=True)
class Operation:
    """How an operation is rewritten: `build` makes a function that takes and gives what the operation does, a table's
    resources in the place of its handle; `outputs` are the names of its outputs, and how many tensors each has;
    `takes_tables` tells whether there must be a handle among its inputs."""

    build: Callable[[FunctionBody, Call], None]
    outputs: Outputs
    takes_tables: bool = True


def _outputs(*names: str) -> Outputs:
    return lambda attrs: [(name, 1) for name in names]


def _of_tables(*names: str) -> Outputs:
    return lambda attrs: [(name, attrs.number("T")) for name in names]


TFRA = ("TFRA>CuckooHashTable", "TFRA>HkvHashTable")
"""What the names of TFRA's operations begin with, by the kind of table."""

TFPLUS = ("KvVariable", "KvVariableV2", "KvVariableV3", "KvVariableV4")
DEEPREC = "KvVarHandleOp"
"""What makes tables of TFPlus and DeepRec: these are restored by name, each part by one of its own."""

HANDLES = frozenset({"KvTableHandle", *(f"{kind}OfTensors" for kind in TFRA), *TFPLUS, DEEPREC})
"""Operations that make tables."""
GIVES_DEFAULTS = frozenset(f"{kind}{does}" for kind in TFRA for does in ("Find", "FindWithExists"))
"""Lookups that are given the rows of missing keys."""
READS_FILES = frozenset(f"{kind}LoadFromFileSystem" for kind in TFRA)
"""Operations that fill tables from files beside a checkpoint."""
IMPORTS_OF_TFPLUS = ("Import", "ImportV2", "ImportV3", "FullOrDeltaImport", "FullOrDeltaImportV2")
NAMED_IN_DEEPREC = {"KvResourceImportV2": 4, "KvResourceImportV3": 2, "KvResourceIncrImport": 2}
"""What restores a table of DeepRec -> the number of the input that is the table's name in the checkpoint."""
BEGUN_IN_DEEPREC = {"InitializeKvVariableOp": 0, "InitializeKvVariableV2Op": 0, "KvResourceImportV2": 1}
"""What says how missing keys of a table of DeepRec are answered -> the number of the input that is the table."""

RESTORES = frozenset(
    {
        "KvTableRestore",
        *(f"{kind}Import" for kind in TFRA),
        *READS_FILES,
        *(f"KvVariable{does}" for does in IMPORTS_OF_TFPLUS),
        *NAMED_IN_DEEPREC,
    }
)
"""Operations that fill tables from a checkpoint: by its name, by tensors that were read, or from files beside it."""
ANSWERS_BEGIN = frozenset({"KvResourceGather", "KvResourceGatherV1"})
"""Lookups whose missing keys are answered with what the table says, always."""

OPERATIONS: dict[str, Operation] = {
    "KvExchangePool": Operation(exchange_ops.pool, _of_tables("rows"), takes_tables=False),
    "KvExchangeReply": Operation(exchange_ops.reply, _outputs("flat", "splits"), takes_tables=False),
    "KvExchangeRequest": Operation(
        exchange_ops.request,
        lambda attrs: [("message", 1), ("splits", 1), ("places", attrs.number("T"))],
        takes_tables=False,
    ),
    "KvExchangeServe": Operation(
        exchange_ops.serve, lambda attrs: [("keys", len(attrs.types("Tout"))), ("counts", 1)], takes_tables=False
    ),
    "KvSamePlaces": Operation(plain_ops.same_places, _outputs("checked"), takes_tables=False),
    "KvTableContains": Operation(plain_ops.contains, _outputs("found")),
    "KvTableGather": Operation(plain_ops.gather, _outputs("rows", "positions")),
    "KvTableGatherMany": Operation(plain_ops.gather_many, _of_tables("rows", "positions")),
    "KvTableIsInitialized": Operation(plain_ops.is_initialized, _outputs("initialized")),
    "KvTablePartition": Operation(plain_ops.partition, _outputs("owner"), takes_tables=False),
    "KvTablePool": Operation(pooled_ops.pool, _of_tables("rows")),
    "KvTableSave": Operation(plain_ops.save, _outputs()),
    "KvTableSize": Operation(plain_ops.size, _outputs("size")),
    "KvTableTrainable": Operation(plain_ops.trainable, _outputs("rows")),
}
"""What serves a model, and what saves it, rewritten."""

for _kind in TFRA:
    OPERATIONS[f"{_kind}Find"] = Operation(tfra_ops.find_rows, _outputs("values"))
    OPERATIONS[f"{_kind}FindWithExists"] = Operation(tfra_ops.find_rows_and_tell, _outputs("values", "exists"))

REFUSED = {
    "KvVariableGatherOrInsertV2": "KvVariableGatherOrZerosV2",
    "KvVariableGatherOrInsertWithCounts": "KvVariableGatherOrZerosV2",
}
"""Those that cannot be rewritten, and say why -> what looks up without inserting."""
for _name in REFUSED:
    OPERATIONS[_name] = Operation(tfplus_ops.insert, _outputs("output"))
OPERATIONS["KvVariableGatherOrZerosV2"] = Operation(tfplus_ops.gather, _outputs("output"))
OPERATIONS["BatchKvVariableGatherOrZerosV2"] = Operation(
    tfplus_ops.gather_batch, lambda attrs: [("output", attrs.number("N"))]
)
OPERATIONS["KvVariableIsInitializedV2"] = Operation(plain_ops.is_initialized, _outputs("is_initialized"))
OPERATIONS["KvResourceGather"] = Operation(deeprec_ops.gather, _outputs("output"))
OPERATIONS["KvResourceGatherV1"] = Operation(deeprec_ops.gather_counted, _outputs("output"))
OPERATIONS["KvVarIsInitializedOp"] = Operation(plain_ops.is_initialized, _outputs("is_initialized"))

OPERATIONS["TFRA>DynamicPartition"] = Operation(
    tfra_ops.partition, lambda attrs: [("outputs", attrs.number("num_partitions"))], takes_tables=False
)
for _name in ("DynamicStitch", "DynamicStitchFast", "ParallelDynamicStitch"):
    OPERATIONS[f"TFRA>{_name}"] = Operation(tfra_ops.stitch, _outputs("merged"), takes_tables=False)
OPERATIONS["TFRA>SparseSegmentSum"] = Operation(tfra_ops.segment_sum, _outputs("output"), takes_tables=False)
OPERATIONS["TFRA>SparseSegmentSumWithNumSegments"] = Operation(
    tfra_ops.segment_sum_of_count, _outputs("output"), takes_tables=False
)
