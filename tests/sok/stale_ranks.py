"""Run by `test_elastic_runs.py`: Horovod is started again under lookups, as an elastic run does, on one rank."""

from __future__ import annotations

import json
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from tfplugin import ranks

ranks.is_elastic = lambda: True  # in the environment it would have Horovod ask the launcher
import tfplugin.sok as sok  # noqa: E402

hvd.init()
sok.init()
before = sok.DynamicVariable(2, "ones", name="before")
ids = tf.ragged.constant([[1, 2]], tf.int64)
begun: list[int] = []
got: dict[str, Any] = {}


@tf.function
def traced() -> Any:
    return sok.lookup_sparse(before, ids, combiners="sum")


def told(call: Any) -> str:
    try:
        return f"went on: {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@hvd.elastic.run
def train(state: Any) -> int:
    begun.append(1)
    if len(begun) == 1:
        got["at first"] = traced().numpy().tolist()
        raise HorovodInternalError("a rank has ended")
    if len(begun) == 2:
        got["traced"] = told(traced)
        got["lookup_sparse"] = told(lambda: sok.lookup_sparse(before, ids, combiners="sum"))
        got["all2all_dense_embedding"] = told(lambda: sok.all2all_dense_embedding(before, tf.constant([1], tf.int64)))
        table = sok.DynamicVariable(2, "ones", name="anew")
        got["anew"] = tf.function(lambda: sok.lookup_sparse(table, ids, combiners="sum"))().numpy().tolist()
        raise tf.errors.UnknownError(None, None, "Horovod has been shut down. This was caused by an exception.")
    raise tf.errors.UnknownError(None, None, "of the program's own")


got["ended"] = told(lambda: train(hvd.elastic.TensorFlowState(variables=[])))
got["times"] = len(begun)
print(json.dumps(got))
