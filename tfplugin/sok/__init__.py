"""The SparseOperationKit API: embeddings over the ranks of a Horovod run, on any machine.

Code written for ``sparse_operation_kit`` runs with its import changed: ``import tfplugin.sok as sok``, or
``from tfplugin.sok import experiment as sok``.
"""

from tfplugin.sok.distributed_variable import Variable
from tfplugin.sok.dump import dump, load
from tfplugin.sok.dynamic_variable import (
    DynamicVariable,
    assign,
    export,
    incremental_model_dump,
    sparse_read_and_evict,
)
from tfplugin.sok.ranks import RankError, init, rank, size
from tfplugin.sok.variables import filter_variables

__all__ = [
    "DynamicVariable",
    "RankError",
    "Variable",
    "assign",
    "dump",
    "export",
    "filter_variables",
    "incremental_model_dump",
    "init",
    "load",
    "rank",
    "size",
    "sparse_read_and_evict",
]
