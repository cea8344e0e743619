"""One rank of `test_elastic_runs.py`: trains in an elastic run of Horovod, in which ranks end and begin.

    elastic_training.py FOLDER STEPS die|grow

die: the last rank is killed in step 7. grow: rank 0 adds a second host to FOLDER/hosts in step 4, and waits for its
rank.
Rank 0 writes how many ranks made each step, and the rows of the end, to FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

DIES_AFTER, GROWS_AFTER = 7, 4


def keys_of(step: int, rank: int) -> list[int]:
    """What a rank looks up in a step."""
    return [1, 2, 10 * step + rank, -rank]


def main() -> None:
    # Not of who asks for the keys: a process that has imported Horovod is one of its ranks.
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import tfplugin.sok as sok

    folder, steps, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    hvd.init()
    sok.init()
    state = hvd.elastic.TensorFlowState(variables=[])

    @hvd.elastic.run
    def train(state: Any) -> None:
        table = sok.DynamicVariable(3, "zeros", name="table")
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
        step = tf.Variable(0, dtype=tf.int64)
        checkpoint = sok.Checkpoint(table=table, optimizer=optimizer, step=step)
        manager = sok.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=2)
        checkpoint.restore(manager.latest_checkpoint)

        @tf.function
        def one(keys: tf.RaggedTensor) -> None:
            with tf.GradientTape() as tape:
                loss = -tf.reduce_sum(sok.lookup_sparse(table, keys, combiners="sum"))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        while step < steps:
            one(tf.ragged.constant([keys_of(int(step), sok.rank())], tf.int64))
            if sok.rank() == 0:
                (folder / f"step-{int(step)}").write_text(str(sok.size()))
            step.assign_add(1)
            if what == "die" and step == DIES_AFTER and sok.rank() == 1:
                os._exit(1)
            if step % 3 == 0:
                manager.save()
                state.commit()
            if what == "grow" and step == GROWS_AFTER:
                (folder / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
                while sok.size() == 1:
                    time.sleep(0.2)
                    state.commit()  # which begins again with the ranks that there are
        kept = sok.export(table)
        (folder / f"rows-{sok.rank()}.json").write_text(json.dumps([one.numpy().tolist() for one in kept]))

    train(state)


if __name__ == "__main__":
    main()
