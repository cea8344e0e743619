"""Builds Horovod for the TensorFlow that is installed, for training on several ranks: ``kvtools setup-horovod``."""
