"""The ``dynamic_embedding`` API of TensorFlow Recommenders Addons, over the tables of tfplugin.

Code written for ``tfra.dynamic_embedding`` runs with its import changed: ``from tfplugin import dynamic_embedding as
de``, or ``import tfplugin.tfra as tfra``.
"""

from tfplugin.dynamic_embedding import checkpoint as _checkpoint
from tfplugin.dynamic_embedding import data_flow, keras, math, ragged_embedding_ops, shadow_ops, train
from tfplugin.dynamic_embedding.creators import CuckooHashTableConfig, CuckooHashTableCreator, KVCreator
from tfplugin.dynamic_embedding.embedding_lookup import (
    embedding_lookup,
    embedding_lookup_sparse,
    embedding_lookup_unique,
    safe_embedding_lookup_sparse,
)
from tfplugin.dynamic_embedding.file_system_saver import (
    DynamicEmbeddingSaver,
    FileSystemSaver,
    FileSystemSaverConfig,
)
from tfplugin.dynamic_embedding.get_variable import get_variable
from tfplugin.dynamic_embedding.hkv_table import (
    HkvEvictStrategy,
    HkvHashTable,
    HkvHashTableConfig,
    HkvHashTableCreator,
)
from tfplugin.dynamic_embedding.model_mode import ModelMode, enable_inference_mode, enable_train_mode, get_model_mode
from tfplugin.dynamic_embedding.optimizer import DynamicEmbeddingOptimizer
from tfplugin.dynamic_embedding.redis_table import RedisTable, RedisTableConfig, RedisTableCreator
from tfplugin.dynamic_embedding.restrict_policies import (
    FrequencyRestrictPolicy,
    RestrictPolicy,
    TimestampRestrictPolicy,
)
from tfplugin.dynamic_embedding.table import CuckooHashTable
from tfplugin.dynamic_embedding.trainable import TrainableWrapper
from tfplugin.dynamic_embedding.trainable_wrapper_filter import trainable_wrapper_filter
from tfplugin.dynamic_embedding.variable import Variable
from tfplugin.dynamic_embedding.warm_start import GraphKeys, WarmStartHook, warm_start

__all__ = [
    "CuckooHashTable",
    "CuckooHashTableConfig",
    "CuckooHashTableCreator",
    "DynamicEmbeddingOptimizer",
    "DynamicEmbeddingSaver",
    "FileSystemSaver",
    "FileSystemSaverConfig",
    "FrequencyRestrictPolicy",
    "GraphKeys",
    "HkvEvictStrategy",
    "HkvHashTable",
    "HkvHashTableConfig",
    "HkvHashTableCreator",
    "KVCreator",
    "ModelMode",
    "RedisTable",
    "RedisTableConfig",
    "RedisTableCreator",
    "RestrictPolicy",
    "TimestampRestrictPolicy",
    "TrainableWrapper",
    "Variable",
    "WarmStartHook",
    "data_flow",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "embedding_lookup_unique",
    "enable_inference_mode",
    "enable_train_mode",
    "get_model_mode",
    "get_variable",
    "keras",
    "math",
    "ragged_embedding_ops",
    "safe_embedding_lookup_sparse",
    "shadow_ops",
    "train",
    "trainable_wrapper_filter",
    "warm_start",
]

_checkpoint.register()
