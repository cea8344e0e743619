"""Optimizers for key-value variables: those of the table engine as classes, and a wrapper for any other."""

from tfplugin.optimizers.adagrad import Adadelta, Adagrad, AdagradDA, ProximalAdagrad
from tfplugin.optimizers.adam import (
    AdaBelief,
    Adam,
    Adamax,
    AdamW,
    AMSGrad,
    Lamb,
    Lion,
    Nadam,
    RectifiedAdam,
)
from tfplugin.optimizers.base import FusedOptimizer
from tfplugin.optimizers.explanation import Explanation, explain
from tfplugin.optimizers.ftrl import Ftrl
from tfplugin.optimizers.group_lasso import (
    GroupAdaBelief,
    GroupAdagrad,
    GroupAdam,
    GroupAMSGrad,
    GroupFtrl,
    GroupLamb,
    GroupMomentum,
    SparseGroupFtrl,
)
from tfplugin.optimizers.in_backward import BackwardUpdates, apply_in_backward
from tfplugin.optimizers.rmsprop import RMSprop
from tfplugin.optimizers.sgd import SGD
from tfplugin.optimizers.wrapper import OptimizerWrapper

__all__ = [
    "SGD",
    "AMSGrad",
    "AdaBelief",
    "Adadelta",
    "Adagrad",
    "AdagradDA",
    "Adam",
    "AdamW",
    "Adamax",
    "BackwardUpdates",
    "Explanation",
    "Ftrl",
    "FusedOptimizer",
    "GroupAMSGrad",
    "GroupAdaBelief",
    "GroupAdagrad",
    "GroupAdam",
    "GroupFtrl",
    "GroupLamb",
    "GroupMomentum",
    "Lamb",
    "Lion",
    "Nadam",
    "OptimizerWrapper",
    "ProximalAdagrad",
    "RMSprop",
    "RectifiedAdam",
    "SparseGroupFtrl",
    "apply_in_backward",
    "explain",
]
