"""Train a click model on the ranks of a Horovod run: embeddings spread over the ranks, the dense part on each of them.

    horovodrun -np 2 python examples/sok_two_ranks.py --steps 200 --save model
    horovodrun -np 3 python examples/sok_two_ranks.py --steps 100 --restore model
    python examples/sok_two_ranks.py --restore model            # one rank; needs no Horovod

Each rank trains on a share of every batch. All numbers of ranks learn the same, whether from the start or from what
another number of ranks saved.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow as tf
from click_log import DENSE_FEATURES, Examples, auc, auc_of_dense, click_log

import tfplugin.sok as sok

try:
    import horovod.tensorflow as hvd

    hvd.init()
except ImportError:  # then there is one rank
    hvd = None
sok.init()

WIDTH = 8  # of an embedding
CATEGORY_ROWS = 1000  # categories are few and known: their hashes share the rows of a static variable


class Model:
    """Embeddings that the ranks hold together, and a network that each of them holds."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.tables = [sok.DynamicVariable(WIDTH, "random", name=name) for name in ("user", "item", "context")]
        # The same on all ranks; each keeps its rows. No table this small needs shape= and initializer=.
        category = rng.uniform(-0.05, 0.05, [CATEGORY_ROWS, WIDTH]).astype(np.float32)
        self.category = sok.Variable(category, name="category")
        self.top = tf.keras.Sequential([tf.keras.layers.Dense(32, "relu"), tf.keras.layers.Dense(1)])
        self.top.build([None, 4 * WIDTH + DENSE_FEATURES])
        if hvd is not None:
            # Horovod wants TensorFlow's variables, which Keras 3 has in `value`.
            hvd.broadcast_variables([v.value for v in self.top.variables], root_rank=0)

    @property
    def embeddings(self) -> list[sok.DynamicVariable | tf.Variable]:
        """The model-parallel variables."""
        return [*self.tables, self.category]

    def logits(self, ids: tf.Tensor, dense: tf.Tensor, training: bool) -> tf.Tensor:
        """Of a click, [batch].

        Args:
            ids: int64 [4, batch]: user, item, context, category.
            dense: float32 [batch, DENSE_FEATURES].
            training: False: ids that training never met count as zeros and get no row.
        """
        user, item, context, category = (tf.RaggedTensor.from_uniform_row_length(one, 1) for one in tf.unstack(ids))
        category = category % CATEGORY_ROWS
        # Ids of all features travel in one exchange, and their rows in another.
        rows = sok.lookup_sparse(
            self.embeddings, [user, item, context, category], combiners=["sum"] * 4, training=training
        )
        return self.top(tf.concat([*rows, dense], axis=1))[:, 0]


def share(examples: Examples) -> list[tf.Tensor]:
    """This rank's part of a batch: ids [4, n], dense features, clicks."""
    mine = slice(sok.rank(), None, sok.size())
    ids = np.stack([examples.ids[name][mine] for name in ("user", "item", "context", "category")])
    return [tf.constant(one) for one in (ids, examples.dense[mine], examples.clicks[mine])]


def main() -> None:
    """Trains, scores another day's impressions, and saves."""
    options = parse_options()
    tf.keras.utils.set_random_seed(options.seed)
    model = Model(options.seed)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(options.learning_rate))
    variables = [*model.embeddings, *model.top.trainable_variables]
    sources = [*model.embeddings, *(v.value for v in model.top.trainable_variables)]
    checkpoint = sok.Checkpoint(
        tables=model.tables, category=model.category, top=model.top, optimizer=optimizer.optimizer
    )
    if options.restore:
        optimizer.build([model.category, *model.top.trainable_variables])
        checkpoint.restore(str(options.restore / "model"))

    @tf.function(reduce_retracing=True)
    def step(ids: tf.Tensor, dense: tf.Tensor, clicks: tf.Tensor) -> tf.Tensor:
        """One training step; gives this rank's part of the loss."""
        with tf.GradientTape() as tape:
            logits = model.logits(ids, dense, training=True)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(clicks, logits)
            # The average of this over the ranks is the mean over the whole batch, also where shares are unequal.
            loss = tf.reduce_sum(losses) * sok.size() / options.batch
        if hvd is not None:
            tape = hvd.DistributedGradientTape(tape)
            for variable in model.embeddings:
                tape.register_local_source(variable)
        optimizer.apply_gradients(zip(tape.gradient(loss, sources), variables, strict=True))
        return loss

    first = int(optimizer.iterations.numpy())
    last = first + options.steps
    for number in range(first + 1, last + 1):
        loss = step(*share(next(click_log(options.seed + number, options.batch))))
        if number % 50 == 0 or number == last:
            loss = loss if hvd is None else hvd.allreduce(loss, name="loss")
            if sok.rank() == 0:
                print(f"step {number:,}  loss {loss.numpy():.4f}", flush=True)

    rows = {table.name.split(":")[0]: int(table.size[0]) for table in model.tables}
    print(f"rank {sok.rank()} of {sok.size()}: {rows}, category {model.category.shape[0]}", flush=True)
    if options.save:
        path = checkpoint.write(str(options.save / "model"))  # the rows of all ranks, and the dense part of rank 0
        if sok.rank() == 0:
            print(f"saved {path}", flush=True)
    score(model, options, last)


def score(model: Model, options: argparse.Namespace, steps: int) -> None:
    """Prints how well the model tells clicks from others, on another day than it was trained on."""
    examples = next(click_log(options.seed, 10 * options.batch))
    ids, dense, _ = share(examples)
    scores = model.logits(ids, dense, training=False)
    scores = scores if hvd is None else hvd.allgather(scores, name="scores")
    if sok.rank() == 0:
        clicks = np.concatenate([examples.clicks[rank :: sok.size()] for rank in range(sok.size())])
        learned, best = auc(clicks, scores.numpy()), auc(examples.clicks, examples.probability)
        baseline = auc_of_dense(next(click_log(options.seed + 1, 10 * options.batch)), examples)
        print(
            f"held-out AUC {learned:.4f} on {sok.size()} ranks, {baseline:.4f} without ids, best possible {best:.4f}",
            flush=True,
        )
        if steps * options.batch >= 400_000:
            assert learned > baseline + 0.02, "the embeddings learned nothing that the dense features do not say"


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    parser.add_argument("--batch", type=int, default=2048, help="examples of a step, on all ranks (default: 2048)")
    parser.add_argument("--learning-rate", type=float, default=0.005, help="of Adam (default: 0.005)")
    parser.add_argument("--save", type=Path, help="folder to save in; all ranks must see it")
    parser.add_argument("--restore", type=Path, help="folder to continue from, of any number of ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the click log and the first weights")
    options = parser.parse_args()
    if options.steps < 0 or options.batch < sok.size():
        parser.error("--steps must not be negative, and --batch no less than the number of ranks")
    return options


if __name__ == "__main__":
    main()
