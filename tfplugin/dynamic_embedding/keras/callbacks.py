"""Callbacks of ``tf.keras``. Those of ``tf_keras`` beside Keras 3: `tfplugin.dynamic_embedding.tf_keras`."""

import tensorflow as _tf

from tfplugin.dynamic_embedding.keras.broadcast import broadcast_of as _broadcast_of
from tfplugin.dynamic_embedding.keras.model_checkpoint import model_checkpoint_of as _model_checkpoint_of

DEHvdModelCheckpoint = _model_checkpoint_of(_tf.keras, __name__)
DEHvdBroadcastGlobalVariablesCallback = _broadcast_of(_tf.keras, __name__)
#: TFRA has it by this name, too.
ModelCheckpoint = DEHvdModelCheckpoint

__all__ = ["DEHvdBroadcastGlobalVariablesCallback", "DEHvdModelCheckpoint", "ModelCheckpoint"]
