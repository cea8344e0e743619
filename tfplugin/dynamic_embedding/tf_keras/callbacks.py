"""Callbacks of ``tf_keras``."""

import tf_keras as _tf_keras

from tfplugin.dynamic_embedding.keras.broadcast import broadcast_of as _broadcast_of
from tfplugin.dynamic_embedding.keras.model_checkpoint import model_checkpoint_of as _model_checkpoint_of

DEHvdModelCheckpoint = _model_checkpoint_of(_tf_keras, __name__)
DEHvdBroadcastGlobalVariablesCallback = _broadcast_of(_tf_keras, __name__)
#: TFRA has it by this name, too.
ModelCheckpoint = DEHvdModelCheckpoint

__all__ = ["DEHvdBroadcastGlobalVariablesCallback", "DEHvdModelCheckpoint", "ModelCheckpoint"]
