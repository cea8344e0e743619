"""Eager mode, tf.function and Keras 3's Adam: train, checkpoint, restore, save for serving. Runs in seconds.

python examples/eager_keras.py
"""

import tempfile

import numpy as np
import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow as tf
from click_log import DENSE_FEATURES, Examples, auc, click_log

import tfplugin


class TwoTowers(tf.Module):
    """Scores a click from a user's and an item's row, and the dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.user = tf.get_kv_variable("user", embedding_dim=4)
        self.item = tf.get_kv_variable("item", embedding_dim=4)
        self.top = tf.keras.Sequential([tf.keras.layers.Dense(32, "relu"), tf.keras.layers.Dense(1)])
        self.top.build([None, 8 + DENSE_FEATURES])

    def logits(self, user: tf.Tensor, item: tf.Tensor, dense: tf.Tensor) -> tf.Tensor:
        """Of a click, [batch]."""
        rows = [tf.nn.embedding_lookup(self.user, user), tf.nn.embedding_lookup(self.item, item)]
        return self.top(tf.concat([*rows, dense], axis=1))[:, 0]

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.int64, "user"),
            tf.TensorSpec([None], tf.int64, "item"),
            tf.TensorSpec([None, DENSE_FEATURES], tf.float32, "dense"),
        ]
    )
    def serve(self, user: tf.Tensor, item: tf.Tensor, dense: tf.Tensor) -> dict[str, tf.Tensor]:
        """Click probabilities. Lookups insert nothing here."""
        with tfplugin.inference_mode():
            return {"probability": tf.sigmoid(self.logits(user, item, dense))}


model = TwoTowers()
optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.02))
variables = [model.user, model.item, *model.top.trainable_variables]


@tf.function(reduce_retracing=True)
def step(user: tf.Tensor, item: tf.Tensor, dense: tf.Tensor, clicks: tf.Tensor) -> tf.Tensor:
    """One training step; gives the loss."""
    with tf.GradientTape() as tape:
        logits = model.logits(user, item, dense)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(clicks, logits))
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss


def features(examples: Examples) -> list[tf.Tensor]:
    """What the model takes."""
    return [tf.constant(x) for x in (examples.ids["user"], examples.ids["item"], examples.dense)]


for number, examples in zip(range(1, 201), click_log(seed=0, batch=2048), strict=False):
    loss = step(*features(examples), tf.constant(examples.clicks))
    if number % 50 == 0:
        print(f"step {number}  loss {float(loss):.3f}  {int(model.user.size()):,} users")

held_out = next(click_log(seed=1, batch=20_000))
scores = model.serve(*features(held_out))["probability"].numpy()
print(f"held-out AUC {auc(held_out.clicks, scores):.3f}")

with tempfile.TemporaryDirectory() as folder:
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(f"{folder}/checkpoint/model")
    again = TwoTowers()
    tf.train.Checkpoint(model=again).restore(path).expect_partial()
    assert np.array_equal(again.serve(*features(held_out))["probability"], scores)
    print("restored from tf.train.Checkpoint: the same scores")

    # To be loaded where tfplugin is imported. `kvtools export` writes what a stock server loads.
    tf.saved_model.save(model, f"{folder}/model", signatures=model.serve)
    serve = tf.saved_model.load(f"{folder}/model").signatures["serving_default"]
    user, item, dense = features(held_out)
    assert np.allclose(serve(user=user, item=item, dense=dense)["probability"], scores)
    print("loaded from the SavedModel: the same scores")
