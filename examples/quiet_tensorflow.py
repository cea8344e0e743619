"""Imports TensorFlow without the start-up notes that it writes to stderr whatever its log level. For examples only."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # here, and in the commands that an example calls
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # key-value tables live in host memory

_stderr = os.dup(2)
_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 2)
try:
    import tensorflow  # noqa: F401
finally:
    os.dup2(_stderr, 2)
    os.close(_stderr)
    os.close(_nowhere)
