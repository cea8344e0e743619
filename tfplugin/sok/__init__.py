"""The SparseOperationKit API: embeddings over the ranks of a Horovod run, on any machine.

Code written for ``sparse_operation_kit`` runs with its import changed: ``import tfplugin.sok as sok``, or
``from tfplugin.sok import experiment as sok``.
"""

import re

import tensorflow as tf

from kvtools import __version__
from tfplugin import tensorflow_hooks
from tfplugin.ranks import RankError, rank, size
from tfplugin.sok import elastic_runs, keras_layers
from tfplugin.sok.all2all_dense_embedding import all2all_dense_embedding
from tfplugin.sok.all2all_layer import All2AllDenseEmbedding
from tfplugin.sok.checkpoint import Checkpoint, CheckpointManager
from tfplugin.sok.distributed_embedding import DistributedEmbedding
from tfplugin.sok.distributed_variable import DistributedVariable, LocalizedVariable, Variable
from tfplugin.sok.dump import dump, load
from tfplugin.sok.dynamic_variable import (
    DynamicVariable,
    assign,
    export,
    incremental_model_dump,
    sparse_read_and_evict,
)
from tfplugin.sok.initialize import init
from tfplugin.sok.legacy_saver import Saver
from tfplugin.sok.lookup_sparse import lookup_sparse
from tfplugin.sok.optimizer import SGD, OptimizerWrapper
from tfplugin.sok.sok1 import Init, OptimizerScope
from tfplugin.sok.variables import filter_variables, split_embedding_variable_from_others

__all__ = [
    "SGD",
    "All2AllDenseEmbedding",
    "Checkpoint",
    "CheckpointManager",
    "DistributedEmbedding",
    "DistributedVariable",
    "DynamicVariable",
    "Init",
    "LocalizedVariable",
    "OptimizerScope",
    "OptimizerWrapper",
    "RankError",
    "Saver",
    "Variable",
    "__version__",
    "all2all_dense_embedding",
    "assign",
    "dump",
    "export",
    "filter_variables",
    "incremental_model_dump",
    "init",
    "load",
    "lookup_sparse",
    "rank",
    "size",
    "sparse_read_and_evict",
    "split_embedding_variable_from_others",
    "tf_version",
]

tf_version = [int(number) for number in re.findall(r"\d+", tf.__version__)[:3]]
"""Of TensorFlow: ``[2, 21, 0]``."""

tensorflow_hooks.add(keras_layers.install, keras_layers.uninstall)

elastic_runs.install()
