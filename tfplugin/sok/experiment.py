"""The API of `tfplugin.sok` under the name that it had before SparseOperationKit 2."""

from tfplugin.sok import *  # noqa: F403 - all of it
from tfplugin.sok import __all__  # noqa: F401
