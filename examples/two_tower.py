"""Recommend movies with two towers: train, serve the vectors, ask for them over HTTP, take the nearest.

    python examples/two_tower.py                         # ratings that are generated, in MovieLens' format
    python examples/two_tower.py --data ml-latest-small  # MovieLens' own: https://grouplens.org/datasets/movielens

One tower makes a vector of a user, the other of a movie and its genres, so that people are near what they will watch.
The last movie of each user is held out. The vectors become the tables of a snapshot, `kvtools serve` answers from it,
and a client that has neither TensorFlow nor the model looks users and movies up and ranks all movies, exactly.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import quiet_tensorflow  # noqa: F401  (before TensorFlow)
import tensorflow as tf
from lookup_server import serve
from movielens import MOST_GENRES, MovieLens, read_movielens, write_movielens

import kvtools
from kvtools.client import Client
from tfplugin.keras import Embedding

keras = tf.keras

WIDTH = 32  # of a vector
TOP = (10, 100)
SCORED = 2000  # users whose last movie is looked for, at most


def main() -> None:
    """From the ratings to recall@k of what the server's vectors say."""
    options = parse_options()
    keras.utils.set_random_seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder) / "ml-generated"
        if options.data is None:
            print(f"writing what {options.users:,} people saw of {options.movies:,} movies to {data.name}", flush=True)
            write_movielens(data, options.seed, options.users, options.movies, ratings=40)
        log = read_movielens(data)
        last = last_of_each(log.user)
        asked = np.flatnonzero(last)
        asked = np.random.default_rng(options.seed).permutation(asked)[:SCORED]
        print(f"{len(log.user):,} ratings, {last.sum():,} of them held out: the last of each user")

        users, movies = user_tower(), movie_tower()
        train(users, movies, log, ~last, options)
        everybody = np.unique(log.user)
        vectors = {
            "users": (everybody, users.predict(everybody, batch_size=4096, verbose=0)),
            "movies": (log.movies, movies.predict((log.movies, log.genres), batch_size=4096, verbose=0)),
        }
        snapshot = Path(folder) / "towers.kvsnap"
        tables = [kvtools.table_from_arrays(name, keys=keys, values=rows) for name, (keys, rows) in vectors.items()]
        kvtools.write_tables(tables, snapshot, "snapshot")
        with serve(snapshot) as url:
            recall = recall_of_served(url, log, last, asked)
            with Client(url) as client:
                for table, (keys, rows) in vectors.items():
                    assert np.array_equal(client.lookup(table, keys)[0], rows), f"served vectors of {table} differ"
    popular = recall_at(np.tile(popularity(log, ~last), (len(asked), 1)), log, last, asked)
    for k in TOP:
        print(f"recall@{k}: {recall[k]:.3f} by the served vectors, {popular[k]:.3f} by popularity alone")
    k = TOP[-1]
    assert recall[k] > 1.2 * popular[k] or options.data, (
        f"recall@{k} {recall[k]:.3f}, and {popular[k]:.3f} by popularity: nothing learned"
    )
    print(
        f"recall@{k} {recall[k]:.3f}, {popular[k]:.3f} by popularity, over all {len(log.movies):,} movies; "
        "the server's vectors are the model's, bit for bit"
    )


def user_tower() -> keras.Model:
    """Users to vectors of length 1."""
    user = keras.Input((), dtype="int64", name="user")
    rows = Embedding(WIDTH, name="user_rows")(user)
    return keras.Model(user, keras.layers.UnitNormalization()(keras.layers.Dense(WIDTH)(rows)), name="users")


def movie_tower() -> keras.Model:
    """Movies and their genres to vectors of length 1."""
    movie = keras.Input((), dtype="int64", name="movie")
    genres = keras.Input((MOST_GENRES,), dtype="int64", name="genres")  # padded with 0
    rows = keras.layers.Concatenate()(
        [
            Embedding(WIDTH, name="movie_rows")(movie),
            Embedding(8, combiner="mean", padding_id=0, name="genre_rows")(genres),
        ]
    )
    vectors = keras.layers.UnitNormalization()(keras.layers.Dense(WIDTH)(rows))
    return keras.Model((movie, genres), vectors, name="movies")


def train(
    users: keras.Model, movies: keras.Model, log: MovieLens, some: np.ndarray, options: argparse.Namespace
) -> None:
    """Has each user of a batch find their movie among those of the batch.

    A popular movie is in many batches, and would be pushed away for it: so the logarithm of how often it comes is taken
    off (X. Yi and others: Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations, 2019).
    """
    user, movie = keras.Input((), dtype="int64"), keras.Input((), dtype="int64")
    genres, often = keras.Input((MOST_GENRES,), dtype="int64"), keras.Input((), dtype="float32")
    near = keras.ops.matmul(users(user), keras.ops.transpose(movies((movie, genres))))  # [batch, batch]
    model = keras.Model((user, movie, genres, often), near / options.temperature - often[None, :], name="two_tower")
    model.compile(
        keras.optimizers.Adam(options.learning_rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    at = np.searchsorted(log.movies, log.movie[some])
    share = np.bincount(at, minlength=len(log.movies)) / some.sum()
    columns = (log.user[some], log.movie[some], log.genres[at], np.log(share[at]).astype(np.float32))
    batches = tf.data.Dataset.from_tensor_slices(columns).shuffle(some.sum(), seed=options.seed)
    batches = batches.batch(options.batch, drop_remainder=True)
    model.fit(
        batches.map(lambda *batch: (batch, tf.range(options.batch))), epochs=options.epochs, shuffle=False, verbose=2
    )


def recall_of_served(url: str, log: MovieLens, last: np.ndarray, asked: np.ndarray) -> dict[int, float]:
    """Recall@k of what the server's vectors say: two lookups, and a product."""
    with Client(url) as client:
        users, known = client.lookup("users", log.user[asked])
        movies, found = client.lookup("movies", log.movies)
        assert known.all() and found.all()
    return recall_at(users @ movies.T, log, last, asked)


def recall_at(scores: np.ndarray, log: MovieLens, last: np.ndarray, asked: np.ndarray) -> dict[int, float]:
    """How many of the held-out movies are among the k best that their user had not seen.

    Args:
        scores: of all movies for the users asked for, [asked, movies].
        log: the ratings.
        last: which of these are held out, bool [ratings].
        asked: numbers of the ratings whose movie is wanted.
    """
    users = log.user[asked]
    seen = np.flatnonzero(~last & np.isin(log.user, users))
    order = np.argsort(users)
    rows = order[np.searchsorted(users, log.user[seen], sorter=order)]
    scores[rows, np.searchsorted(log.movies, log.movie[seen])] = -np.inf
    wanted = np.searchsorted(log.movies, log.movie[asked])
    rank = (scores > scores[np.arange(len(scores)), wanted][:, None]).sum(axis=1)
    return {k: float((rank < k).mean()) for k in TOP}


def popularity(log: MovieLens, some: np.ndarray) -> np.ndarray:
    """How often each movie was rated, [movies]."""
    return np.bincount(np.searchsorted(log.movies, log.movie[some]), minlength=len(log.movies)).astype(np.float32)


def last_of_each(user: np.ndarray) -> np.ndarray:
    """Which ratings are the last of their user, bool [ratings]."""
    last = np.zeros(len(user), bool)
    _, from_behind = np.unique(user[::-1], return_index=True)
    last[len(user) - 1 - from_behind] = True
    return last


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with ratings.csv and movies.csv (default: generated ones)")
    parser.add_argument("--users", type=int, default=4000, help="people to generate (default: 4000)")
    parser.add_argument("--movies", type=int, default=2000, help="movies to generate (default: 2000)")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the ratings (default: 6)")
    parser.add_argument("--batch", type=int, default=512, help="ratings of a step (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.1, help="of the softmax (default: 0.1)")
    parser.add_argument("--learning-rate", type=float, default=0.01, help="of Adam (default: 0.01)")
    parser.add_argument("--seed", type=int, default=0, help="of the generated ratings and the first weights")
    options = parser.parse_args()
    if min(options.users, options.movies, options.epochs, options.batch) < 1:
        parser.error("--users, --movies, --epochs and --batch must be positive")
    return options


if __name__ == "__main__":
    main()
