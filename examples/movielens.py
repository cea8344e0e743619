"""Ratings in MovieLens' format: reads them, and writes generated ones with a planted taste. NumPy only, seeded.

The format is that of ml-latest, ml-25m and ml-32m: a folder with `ratings.csv` (userId,movieId,rating,timestamp) and
`movies.csv` (movieId,title,genres), genres with | between them, each with a line of names first.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: Those of MovieLens. Number 0 stands for no genre.
GENRES = (
    *("Action", "Adventure", "Animation", "Children", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "IMAX", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
MOST_GENRES = 4  # of a movie that are looked at

_TASTES = 6


@dataclass(frozen=True)
class MovieLens:
    """Ratings in the order of their time, and the movies."""

    user: np.ndarray  # int64 [ratings]
    movie: np.ndarray  # int64 [ratings]
    rating: np.ndarray  # float32 [ratings], 0.5 to 5
    movies: np.ndarray  # int64 [movies]: all there are, ascending
    genres: np.ndarray  # int64 [movies, MOST_GENRES]: numbers of `GENRES` from 1 on, then zeros


def read_movielens(folder: Path) -> MovieLens:
    """Reads the two files; ids are any 64-bit numbers. Leaves the program if a movie is rated that there is not."""
    columns = np.dtype([("user", np.int64), ("movie", np.int64), ("rating", np.float32), ("time", np.float64)])
    table = np.loadtxt(folder / "ratings.csv", delimiter=",", skiprows=1, dtype=columns, ndmin=1)
    table = table[np.argsort(table["time"], kind="stable")]
    number = {name: at for at, name in enumerate(GENRES, 1)}
    movies = {}
    with (folder / "movies.csv").open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            known = [number[name] for name in line["genres"].split("|") if name in number][:MOST_GENRES]
            movies[int(line["movieId"])] = known + [0] * (MOST_GENRES - len(known))
    ids = np.array(sorted(movies), np.int64)
    unknown = np.setdiff1d(table["movie"], ids)
    if len(unknown):
        raise SystemExit(f"{folder}: {len(unknown):,} movies of ratings.csv are not in movies.csv, as {unknown[0]}")
    return MovieLens(
        user=table["user"].copy(),
        movie=table["movie"].copy(),
        rating=table["rating"].copy(),
        movies=ids,
        genres=np.array([movies[movie] for movie in ids.tolist()], np.int64),
    )


def write_movielens(folder: Path, seed: int, users: int, movies: int, ratings: int) -> None:
    """Writes ratings of `users` people who see `ratings` movies each.

    A movie has a place among tastes, made of its genres and of something of its own; people see what is near their own
    taste, and what everybody sees.
    """
    rng = np.random.default_rng(seed)
    genre_taste = rng.normal(size=(len(GENRES), _TASTES))
    has = [rng.choice(len(GENRES), rng.integers(1, 4), replace=False) for _ in range(movies)]
    taste = np.stack([genre_taste[one].mean(axis=0) for one in has]) + 0.5 * rng.normal(size=(movies, _TASTES))
    taste /= np.linalg.norm(taste, axis=1, keepdims=True)
    liking = rng.normal(size=(users, _TASTES))
    liking /= np.linalg.norm(liking, axis=1, keepdims=True)
    popular = -0.8 * np.log(rng.permutation(movies) + 10.0)

    affinity = liking @ taste.T  # [users, movies], -1 to 1
    # The largest of these are a sample without replacement, in the order in which it was drawn.
    drawn = popular + 5.0 * affinity + rng.gumbel(size=affinity.shape)
    seen = np.argsort(-drawn, axis=1)[:, :ratings]
    seen = rng.permuted(seen, axis=1)
    score = 3.0 + 1.5 * np.take_along_axis(affinity, seen, axis=1) + 0.7 * rng.normal(size=seen.shape)
    score = np.clip(np.round(2 * score) / 2, 0.5, 5.0)
    time = 1_500_000_000 + np.sort(rng.integers(0, 30_000_000, seen.shape), axis=1)

    folder.mkdir(parents=True, exist_ok=True)
    ids = 1 + 3 * np.arange(movies)  # as in MovieLens, not all numbers are a movie
    with (folder / "movies.csv").open("w") as file:
        file.write("movieId,title,genres\n")
        for movie, genres in zip(ids.tolist(), has, strict=True):
            file.write(
                f"{movie},Movie {movie} ({1950 + movie % 70}),{'|'.join(GENRES[one] for one in sorted(genres))}\n"
            )
    with (folder / "ratings.csv").open("w") as file:
        file.write("userId,movieId,rating,timestamp\n")
        for user in range(users):
            rows = zip(ids[seen[user]].tolist(), score[user].tolist(), time[user].tolist(), strict=True)
            file.writelines(f"{user + 1},{movie},{stars},{when}\n" for movie, stars, when in rows)
