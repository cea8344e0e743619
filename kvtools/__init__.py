"""Offline tools for key-value embedding checkpoints: inspect, clip, export and serve them without TensorFlow.

The package opens a checkpoint through one of its dialects (`kvtools.dialects`) and works on the streams of
rows that the dialect gives. Nothing here imports TensorFlow but `kvtools.export`, inside the one function
that writes a SavedModel.
"""

__version__ = "0.1.0"
