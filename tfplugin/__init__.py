"""Key-value embedding variables for TensorFlow.

``import tfplugin`` makes ``tf.get_kv_variable`` available; see `get_kv_variable`. `tfplugin.keras` and
`tfplugin.tf_keras` have layers; each imports its Keras when it is first used.
"""

import importlib as _importlib

from kvtools import op_library as _op_library

try:
    import tensorflow as _tensorflow  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "tensorflow":
        raise
    raise ModuleNotFoundError(
        f"tfplugin needs TensorFlow {_op_library.SUPPORTED}, and none is installed: pip install 'kvtools[tensorflow]'",
        name="tensorflow",
    ) from None

from tfplugin import checkpoint as _checkpoint
from tfplugin import optimizers, policies
from tfplugin.chain.manager import CheckpointManager
from tfplugin.export_saved_model import export_saved_model
from tfplugin.get_kv_variable import get_kv_variable
from tfplugin.initializers import KvInitializer
from tfplugin.kv_variable import KvVariable
from tfplugin.lookup_many import lookup_many
from tfplugin.optimizers import OptimizerWrapper, apply_in_backward, explain
from tfplugin.partitioned_kv_variable import PartitionedKvVariable
from tfplugin.policy_file import PolicyFile, policy
from tfplugin.restore_tables import restore_tables
from tfplugin.spilling import spill_in
from tfplugin.string_hash import string_keys
from tfplugin.telemetry import TensorBoardHook, gradient_norms, summary, survey, tensorboard_callback, watch_gradients
from tfplugin.tensorflow_hooks import install, uninstall
from tfplugin.training_mode import inference_mode
from tfplugin.warm_start import warm_start

__all__ = [
    "CheckpointManager",
    "KvInitializer",
    "KvVariable",
    "OptimizerWrapper",
    "PartitionedKvVariable",
    "PolicyFile",
    "TensorBoardHook",
    "apply_in_backward",
    "explain",
    "export_saved_model",
    "get_kv_variable",
    "gradient_norms",
    "inference_mode",
    "install",
    "lookup_many",
    "optimizers",
    "policies",
    "policy",
    "restore_tables",
    "spill_in",
    "string_keys",
    "summary",
    "survey",
    "tensorboard_callback",
    "uninstall",
    "warm_start",
    "watch_gradients",
]

_checkpoint.register()
install()


def __getattr__(name: str) -> object:
    if name in ("keras", "tf_keras"):
        return _importlib.import_module(f"tfplugin.{name}")
    raise AttributeError(f"module 'tfplugin' has no attribute '{name}'")
