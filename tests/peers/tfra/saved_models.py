"""Models of TFRA's demos, and all its lookups, as SavedModels with what TFRA answers. Runs in TFRA's environment.

    python saved_models.py FOLDER

A folder for each model: `model`, and `asked.pickle`, a list of (signature, request, answers). The demos' models are
built as TFRA's demos build them, of ratings that are drawn: of users and movies of which few are rated often.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow_recommenders_addons import dynamic_embedding as de

tf.get_logger().setLevel("ERROR")
v1 = tf.compat.v1
RANDOM = np.random.default_rng(0)
USERS, MOVIES = 300, 200
BATCHES, BATCH = 10, 1000
TFRA = tf.saved_model.SaveOptions(namespace_whitelist=["TFRA"])
IDS = tf.TensorSpec([None], tf.int64)


def ratings(count: int) -> dict[str, np.ndarray]:
    """Users and movies, each with a rating of 1 to 5."""
    return {
        "user_id": RANDOM.zipf(1.3, count) % USERS,
        "movie_id": RANDOM.zipf(1.3, count) % MOVIES + 2**40,
        "user_rating": RANDOM.integers(1, 6, count),
    }


def ids(count: int, known: np.ndarray, missing: float = 0.3) -> np.ndarray:
    """Keys that are there, some of them twice, and keys that are not."""
    drawn = RANDOM.choice(known, count)
    return np.where(RANDOM.random(count) < missing, RANDOM.integers(-(2**62), 2**62, count), drawn)


def ask(folder: Path, requests: list[tuple[str, dict[str, np.ndarray]]], in_session: bool = False) -> None:
    """Load the model, and keep what it answers."""
    path = str(folder / "model")
    asked = []
    with tf.Graph().as_default() if in_session else contextlib.nullcontext():
        if in_session:
            session = v1.Session()
            definitions = v1.saved_model.load(session, ["serve"], path).signature_def
        else:
            model = tf.saved_model.load(path)
        for signature, fed in requests:
            if in_session:
                inputs, outputs = definitions[signature].inputs, definitions[signature].outputs
                named = {inputs[name].name: value for name, value in fed.items()}
                answers = session.run({name: info.name for name, info in outputs.items()}, named)
            else:
                function = model.signatures[signature]
                specs = function.structured_input_signature[1]
                if "" in fed:  # Keras has called its only input as it liked
                    fed = {next(iter(specs)): fed[""]}
                got = function(**{name: tf.constant(value, specs[name].dtype) for name, value in fed.items()})
                answers = {name: tensor.numpy() for name, tensor in got.items()}
            asked.append((signature, fed, answers))
    (folder / "asked.pickle").write_bytes(pickle.dumps(asked))


def of_movies(
    missing: float, users: np.ndarray | None = None, movies: np.ndarray | None = None
) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Requests to a model of users and movies."""
    users = np.arange(USERS) if users is None else users
    movies = np.arange(MOVIES) + 2**40 if movies is None else movies
    drawn = ({"user_id": ids(BATCH, users, missing), "movie_id": ids(BATCH, movies, missing)} for _ in range(BATCHES))
    return [("serving_default", fed) for fed in drawn]


# ---- Keras: movielens-1m-keras ----


class TwoTowers(tf_keras.Model):
    """Users' and movies' rows side by side, two layers over them, and one straight to the ratings."""

    def __init__(self, dim: int, initializer: Any, is_training: bool) -> None:
        if not is_training:
            de.enable_inference_mode()
        super().__init__()
        self.user_embedding = de.keras.layers.SquashedEmbedding(dim, initializer=initializer, name="user_embedding")
        self.movie_embedding = de.keras.layers.SquashedEmbedding(dim, initializer=initializer, name="movie_embedding")
        self.hidden = [tf_keras.layers.Dense(size, "relu") for size in (64, 16)]
        self.deep = tf_keras.layers.Dense(5, "softmax")
        self.wide = tf_keras.layers.Dense(5, "softmax")

    @tf.function
    def call(self, features: Any) -> Any:
        user = self.user_embedding(tf.reshape(features["user_id"], (-1, 1)))
        movie = self.movie_embedding(tf.reshape(features["movie_id"], (-1, 1)))
        x = latent = tf.concat([user, movie], axis=1)
        for layer in self.hidden:
            x = layer(x)
        return 0.2 * self.deep(x) + 0.8 * self.wide(latent)


def trained(model: Any, steps: int = 3) -> Any:
    """Take some steps."""
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras.optimizers.Adam(1e-3))
    model.compile(optimizer=optimizer, loss=tf_keras.losses.MeanSquaredError(), metrics=[tf_keras.metrics.AUC()])
    for _ in range(steps):
        data = ratings(256)
        labels = tf.one_hot(data.pop("user_rating") - 1, 5)
        model.fit({name: tf.constant(value) for name, value in data.items()}, labels, batch_size=128, verbose=0)
    return model


def keras_train(folder: Path) -> None:
    """What the demo's training saves. It draws rows for missing keys, so it is asked for those that it has."""
    model = trained(TwoTowers(8, tf_keras.initializers.RandomNormal(0.0, 0.5), True))
    known = [layer.params.export()[0].numpy() for layer in (model.user_embedding, model.movie_embedding)]
    model.save(str(folder / "model"), options=TFRA)
    ask(folder, of_movies(0.0, *known))


def keras_export(folder: Path) -> None:
    """What the demo exports for serving, from what training saved."""
    model = TwoTowers(8, tf_keras.initializers.Zeros(), False)
    model.load_weights(str(folder.parent / "keras_train" / "model"))
    model({"user_id": tf.zeros((16,), tf.int64), "movie_id": tf.zeros((16,), tf.int64)})
    spec = {
        "user_id": tf.TensorSpec([None], tf.int64, "user_id"),
        "movie_id": tf.TensorSpec([None], tf.int64, "movie_id"),
    }
    signature = model.call.get_concrete_function(spec)
    tf_keras.models.save_model(
        model, str(folder / "model"), options=TFRA, include_optimizer=False, signatures=signature
    )
    ask(folder, of_movies(0.3))


# ---- Keras: amazon-video-games-keras-eager ----

FIELDS = 4


def field_of(feature: Any) -> Any:
    """The field of a feature: its last two bits."""
    return tf.math.floormod(feature, FIELDS)


class Fields(tf_keras.Model):
    """Features by field, with the features that are seldom seen thrown out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = de.keras.layers.FieldWiseEmbedding(
            4,
            FIELDS,
            initializer=tf_keras.initializers.RandomNormal(0.0, 0.05),
            restrict_policy=de.FrequencyRestrictPolicy,
            slot_map_fn=field_of,
            bp_v2=False,
            combiner="mean",
            name="fields",
        )
        self.flat = tf_keras.layers.Flatten()
        self.hidden = tf_keras.layers.Dense(16, "relu")
        self.out = tf_keras.layers.Dense(1, "sigmoid", use_bias=False)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64)])
    def call(self, x: Any) -> Any:
        return self.out(self.hidden(self.flat(self.embedding(x))))


def field_wise(folder: Path) -> None:
    """Trains with a restrict policy, and saves as the demo does, for training and serving alike."""
    model = Fields()
    model.compile(de.DynamicEmbeddingOptimizer(tf_keras.optimizers.Adam(1e-3)), "binary_crossentropy")
    for _ in range(3):
        model.fit(RANDOM.zipf(1.3, (64, 6)) % 500, RANDOM.integers(0, 2, (64, 1)), verbose=0)
        model.embedding.params.restrict(80, trigger=100)
    known = model.embedding.params.export()[0].numpy()
    tf_keras.models.save_model(model, str(folder / "model"), options=TFRA)
    # What training saved draws rows for missing keys.
    ask(folder, [("serving_default", {"": RANDOM.choice(known, (BATCH, 6))}) for _ in range(BATCHES)])


# ---- Keras: movielens-1m-keras-with-horovod, on one rank ----


class Channels(tf_keras.Model):
    """Two tables that several features share, with their rows in files beside the model, and a layer norm."""

    def __init__(self, initializer: Any, is_training: bool) -> None:
        de.enable_train_mode() if is_training else de.enable_inference_mode()
        super().__init__()
        self.embeddings = [
            de.keras.layers.HvdAllToAllEmbedding(
                mpi_size=1,
                embedding_size=dim,
                initializer=initializer,
                name=name,
                init_capacity=4096,
                kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver(proc_size=1, proc_rank=0)),
                short_file_name=True,
            )
            for name, dim in (("dense_channel", 4), ("sparse_channel", 8))
        ]
        self.norm = de.keras.layers.LayerNormalization()
        self.hidden = tf_keras.layers.Dense(16, "relu")
        self.out = tf_keras.layers.Dense(5, "softmax")

    @tf.function
    def call(self, features: Any) -> Any:
        rows = []
        for layer, names in zip(self.embeddings, (("gender", "age"), ("user_id", "movie_id")), strict=True):
            columns = [tf.reshape(features[name], (-1, 1)) + (at << 48) for at, name in enumerate(names)]
            rows.append(tf_keras.layers.Flatten()(layer(tf.concat(columns, 1))))
        return {"user_rating": self.out(self.hidden(self.norm(tf.concat(rows, 1))))}


@tf.function
def serve(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def features(count: int) -> dict[str, np.ndarray]:
    return {
        "gender": ids(count, np.arange(2)).reshape(-1, 1),
        "age": ids(count, np.arange(10)).reshape(-1, 1),
        "user_id": ids(count, np.arange(USERS)).reshape(-1, 1),
        "movie_id": ids(count, np.arange(MOVIES)).reshape(-1, 1),
    }


def horovod(folder: Path) -> None:
    """Saved by TFRA's `save_model`; then the graph is written anew, as the demo does, for a single process."""
    from tensorflow.python.saved_model import save as tf_save

    # The layer wants Horovod to be there; on one rank it calls nothing of it.
    alone = types.ModuleType("horovod.tensorflow")
    sys.modules.update({"horovod": types.ModuleType("horovod"), "horovod.tensorflow": alone})
    sys.modules["horovod"].tensorflow = alone  # type: ignore[attr-defined]
    model = Channels(tf_keras.initializers.RandomNormal(0.0, 0.5), True)
    model.compile(de.DynamicEmbeddingOptimizer(tf_keras.optimizers.Adam(1e-3)), "mse")
    for _ in range(3):
        fed = {name: tf.constant(value) for name, value in features(128).items()}
        model.fit(fed, {"user_rating": tf.one_hot(RANDOM.integers(0, 5, 128), 5)}, verbose=0)
    arguments, keywords = model.save_spec()
    path = str(folder / "model")
    signatures = {"serving_default": serve.get_concrete_function(model, *arguments, **keywords)}
    de.keras.models.save_model(
        model, path, overwrite=True, include_optimizer=False, options=TFRA, signatures=signatures
    )
    tf_keras.backend.clear_session()
    served = Channels(tf_keras.initializers.Zeros(), False)
    tf_save.save_and_return_nodes(
        obj=served,
        export_dir=path,
        options=TFRA,
        experimental_skip_checkpoint=True,
        signatures={"serving_default": serve.get_concrete_function(served, *arguments, **keywords)},
    )
    # TFRA's `tf.saved_model.load` leaves tables in files empty; a session, as in TensorFlow Serving, fills them.
    ask(folder, [("serving_default", features(BATCH)) for _ in range(BATCHES)], in_session=True)


# ---- Graphs: movielens-100k-estimator ----


def tower(users: Any, movies: Any, is_training: bool) -> tuple[Any, list[Any]]:
    """The estimator's `model_fn`, on two parameter servers that are one process."""
    initializer = tf_keras.initializers.RandomNormal(-1, 1) if is_training else tf_keras.initializers.Zeros()
    rows, wrappers = [], []
    for name, values in (("user_dynamic_embeddings", users), ("moive_dynamic_embeddings", movies)):
        table = de.get_variable(name=name, dim=8, devices=["/CPU:0"] * 2, initializer=initializer)
        unique, places = tf.unique(values)
        found, wrapper = de.embedding_lookup(
            params=table, ids=unique, name=f"{name.partition('_')[0]}-id-weights", return_trainable=True
        )
        rows.append(tf.gather(found, places))
        wrappers.append(wrapper)
    x = tf.concat(rows, axis=1)
    for number, size in enumerate((16, 1)):
        kernel = v1.get_variable(f"kernel_{number}", [x.shape[1], size])
        x = tf.nn.bias_add(x @ kernel, v1.get_variable(f"bias_{number}", [size]))
        x = tf.nn.relu(x) if size > 1 else x
    return tf.reshape(x, [-1]), wrappers


def estimator(folder: Path) -> None:
    """An estimator trains, restores what it trained in a graph for serving, and writes that as a SavedModel."""
    with tf.Graph().as_default(), v1.Session() as session:
        v1.enable_resource_variables()
        users, movies, rated = (v1.placeholder(dtype, [None]) for dtype in (tf.int64, tf.int64, tf.float32))
        out, _ = tower(users, movies, True)
        optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.001))
        step = optimizer.minimize(tf.reduce_mean((out - rated) ** 2), global_step=v1.train.get_or_create_global_step())
        saver = v1.train.Saver(sharded=True)
        session.run(v1.global_variables_initializer())
        for _ in range(5):
            data = ratings(256)
            fed = {users: data["user_id"], movies: data["movie_id"], rated: data["user_rating"].astype(np.float32)}
            session.run(step, fed)
        saved = saver.save(session, str(folder / "trained"))
    de.enable_inference_mode()
    with tf.Graph().as_default(), v1.Session() as session:
        fed = {name: v1.placeholder(tf.int64, [None], name) for name in ("user_id", "movie_id")}
        out, _ = tower(fed["user_id"], fed["movie_id"], False)
        v1.train.get_or_create_global_step()
        saver = v1.train.Saver(sharded=True)
        saver.restore(session, saved)
        session.run(v1.local_variables_initializer())
        infos = [{name: v1.saved_model.build_tensor_info(t) for name, t in of.items()} for of in (fed, {"out": out})]
        signature = v1.saved_model.build_signature_def(*infos, "tensorflow/serving/predict")
        builder = v1.saved_model.Builder(str(folder / "model"))
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            {"serving_default": signature, "predict_export_outputs": signature},
            main_op=tf.group(v1.local_variables_initializer(), v1.tables_initializer()),
            saver=saver,
            strip_default_attrs=True,
        )
        builder.save()
        asked = []
        for name, request in of_movies(0.3):
            got = session.run(out, {fed[key]: value for key, value in request.items()})
            asked.append((name, request, {"out": got}))
        (folder / "asked.pickle").write_bytes(pickle.dumps(asked))


# ---- All lookups ----


def tables() -> dict[str, Any]:
    """Tables of several types, on one device, on two and on three."""
    two, three = ["/CPU:0"] * 2, ["/CPU:0"] * 3
    return {
        "users": de.get_variable("users", dim=4, devices=three, initializer=0.25),
        "items": de.get_variable("items", key_dtype=tf.int32, dim=3, initializer=-1.0),
        "policy": de.get_variable(
            "policy", dim=2, devices=two, initializer=0.5, restrict_policy=de.TimestampRestrictPolicy
        ),
        "wide": de.get_variable("wide", value_dtype=tf.float64, dim=2, initializer=0.0, devices=three),
        "half": de.get_variable("half", value_dtype=tf.float16, dim=2, initializer=1.0),
    }


def filled(made: dict[str, Any]) -> list[Any]:
    """What gives them rows."""
    filling = []
    for table in made.values():
        rows = RANDOM.standard_normal((USERS, table.dim)) * 100
        filling.append(table.upsert(tf.constant(KNOWN, table.key_dtype), tf.cast(rows, table.value_dtype)))
    return filling


KNOWN = np.arange(USERS) - 100


class Shadows(tf.Module):
    """TFRA's lookups in functions: of shadow variables, and of the tables themselves."""

    def __init__(self) -> None:
        super().__init__()
        for name, table in tables().items():
            setattr(self, name, table)
        filled({name: getattr(self, name) for name in ("users", "items", "policy", "wide", "half")})
        self.shadow = de.shadow_ops.ShadowVariable(self.users, name="shadow")
        self.clipped = de.shadow_ops.ShadowVariable(self.users, name="clipped", max_norm=0.5)

    @tf.function(input_signature=[IDS])
    def plain(self, ids: Any) -> Any:
        narrow = tf.bitcast(ids, tf.int32)[:, 0]
        found, there = self.users.lookup(ids, return_exists=True)
        return {
            "named": de.embedding_lookup(self.users, ids, name="named"),
            "narrow": de.embedding_lookup(self.items, narrow, name="narrow"),
            "matrix": de.embedding_lookup(self.items, tf.reshape(narrow, [-1, 2]), name="matrix"),
            "shadow": de.shadow_ops.embedding_lookup(self.shadow, ids),
            "unique": de.shadow_ops.embedding_lookup_unique(self.shadow, ids, 4),
            "clipped": de.shadow_ops.embedding_lookup(self.clipped, ids),
            "policy": self.policy.lookup(ids),
            "wide": self.wide.lookup(ids),
            "half": self.half.lookup(ids),
            "found": found,
            "there": there,
        }

    @tf.function(input_signature=[tf.SparseTensorSpec([None, None], tf.int64), tf.TensorSpec([None], tf.float32)])
    def pooled(self, sparse: Any, weights: Any) -> Any:
        return pooled_by(self.shadow, sparse, weights)


def pooled_by(params: Any, sparse: Any, weights: Any) -> dict[str, Any]:
    """Each way to pool."""
    weights = tf.SparseTensor(sparse.indices, weights, sparse.dense_shape)
    answers = {}
    for combiner in ("sum", "mean", "sqrtn"):
        for how, weighted in (("plain", None), ("weighted", weights)):
            name = f"{how}_{combiner}"
            answers[name] = de.embedding_lookup_sparse(params, sparse, weighted, combiner=combiner, name=name)
            answers[f"safe_{name}"] = de.safe_embedding_lookup_sparse(
                params, sparse, weighted, combiner=combiner, name=f"safe_{name}"
            )
    return answers


def bags() -> dict[str, np.ndarray]:
    """A sparse matrix of ids, and weights; the last row has an id."""
    sizes = RANDOM.integers(0, 4, BATCH)
    sizes[-1] = 1
    places = np.array([(row, column) for row in range(BATCH) for column in range(sizes[row])])
    weights = RANDOM.standard_normal(len(places)).astype(np.float32)
    return {"places": places, "values": ids(len(places), KNOWN), "shape": np.array([BATCH, 4]), "weights": weights}


def shadows(folder: Path) -> None:
    """TFRA's lookups in functions, in inference mode."""
    de.enable_inference_mode()
    module = Shadows()
    signatures = {"plain": module.plain, "pooled": module.pooled}
    tf.saved_model.save(module, str(folder / "model"), signatures=signatures, options=TFRA)
    requests = [("plain", {"ids": ids(BATCH, KNOWN)}) for _ in range(BATCHES)]
    for drawn in (bags() for _ in range(BATCHES)):
        fed = {"sparse": drawn["places"], "sparse_1": drawn["values"], "sparse_2": drawn["shape"]}
        requests.append(("pooled", {**fed, "weights": drawn["weights"]}))
    ask(folder, requests)


def graph(folder: Path) -> None:
    """TFRA's lookups in a graph, in inference mode: of tables."""
    de.enable_inference_mode()
    with tf.Graph().as_default(), v1.Session() as session:
        made = tables()
        fed = {
            "places": v1.placeholder(tf.int64, [None, 2], "places"),
            "values": v1.placeholder(tf.int64, [None], "values"),
            "shape": v1.placeholder(tf.int64, [2], "shape"),
            "weights": v1.placeholder(tf.float32, [None], "weights"),
        }
        sparse = tf.SparseTensor(fed["places"], fed["values"], fed["shape"])
        answers = pooled_by(made["users"], sparse, fed["weights"])
        for name, table in made.items():
            keys = tf.cast(fed["values"], table.key_dtype)
            answers[name] = tf.identity(de.embedding_lookup(table, keys, name=f"plain_{name}"))
            answers[f"{name}_unique"] = de.embedding_lookup_unique(table, keys, name=f"unique_{name}")
            answers[f"{name}_clipped"] = tf.identity(
                de.embedding_lookup(table, keys, name=f"clipped_{name}", max_norm=None if name == "half" else 1.5)
            )
        session.run(v1.global_variables_initializer())
        session.run(v1.local_variables_initializer())
        session.run(filled(made))
        v1.saved_model.simple_save(session, str(folder / "model"), fed, answers)
        requests = [("serving_default", bags()) for _ in range(BATCHES)]
        asked = [
            (name, request, session.run(answers, {fed[key]: value for key, value in request.items()}))
            for name, request in requests
        ]
        (folder / "asked.pickle").write_bytes(pickle.dumps(asked))


def in_child(build: Callable[[Path], None], folder: Path) -> None:
    """Each model in a process of its own: TFRA keeps tables by name, and its mode, for a whole process."""
    child = os.fork()
    if not child:
        status = 1
        try:
            folder.mkdir()
            build(folder)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{build.__name__} failed")


MODELS = (keras_train, keras_export, field_wise, horovod, estimator, shadows, graph)

if __name__ == "__main__":
    chosen = sys.argv[2:]
    for model in MODELS:
        if not chosen or model.__name__ in chosen:
            in_child(model, Path(sys.argv[1]) / model.__name__)
