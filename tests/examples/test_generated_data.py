"""What the examples generate is in the formats that it is said to be in, and they read it back."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def criteo_log(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import criteo_log

    return criteo_log


@pytest.fixture
def movielens(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import movielens

    return movielens


@pytest.fixture
def user_behaviour(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import user_behaviour

    return user_behaviour


def test_a_log_in_the_format_of_criteo(criteo_log: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo_log, "CARDINALITIES", (50,) * criteo_log.SPARSE_FEATURES)
    criteo_log._cumulative.cache_clear()
    log = criteo_log.write_tsv(tmp_path / "train.txt", 1, 300)
    lines = [line.split("\t") for line in (tmp_path / "train.txt").read_text().splitlines()]
    assert len(lines) == 300 and {len(line) for line in lines} == {1 + 13 + 26}
    assert np.array_equal([int(line[0]) for line in lines], log.clicks)
    assert all(re.fullmatch(r"\d*", field) for line in lines for field in line[1:14])
    assert all(re.fullmatch(r"([0-9a-f]{8})?", field) for line in lines for field in line[14:])
    empty = np.mean([field == "" for line in lines for field in line[1:]])
    assert 0.01 < empty < 0.03
    again = criteo_log.write_tsv(tmp_path / "again.txt", 1, 300)
    assert np.array_equal(again.clicks, log.clicks)
    assert (tmp_path / "again.txt").read_bytes() == (tmp_path / "train.txt").read_bytes()


def test_ratings_in_the_format_of_movielens(movielens: ModuleType, tmp_path: Path) -> None:
    movielens.write_movielens(tmp_path, seed=1, users=20, movies=30, ratings=5)
    assert (tmp_path / "ratings.csv").read_text().startswith("userId,movieId,rating,timestamp\n1,")
    log = movielens.read_movielens(tmp_path)
    assert len(log.user) == 100 and np.array_equal(np.unique(log.user), np.arange(1, 21))
    assert np.isin(log.movie, log.movies).all() and log.genres.shape == (30, movielens.MOST_GENRES)
    assert log.rating.min() >= 0.5 and log.rating.max() <= 5.0 and np.array_equal(2 * log.rating % 1, np.zeros(100))
    assert (log.genres[:, 0] > 0).all() and log.genres.max() <= len(movielens.GENRES)


def test_a_line_of_movielens_own(movielens: ModuleType, tmp_path: Path) -> None:
    """Titles with commas, movies without genres, ratings in any order."""
    (tmp_path / "movies.csv").write_text(
        'movieId,title,genres\n11,"American President, The (1995)",Comedy|Drama|Romance\n3,None,(no genres listed)\n'
    )
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n2,11,4.5,964982703\n1,3,0.5,964981247\n")
    log = movielens.read_movielens(tmp_path)
    assert log.movies.tolist() == [3, 11] and log.user.tolist() == [1, 2] and log.rating.tolist() == [0.5, 4.5]
    assert log.genres.tolist() == [[0, 0, 0, 0], [5, 8, 15, 0]]


def test_ids_of_64_bits_are_what_they_are(movielens: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "movies.csv").write_text(f"movieId,title,genres\n{2**53 + 1},One,Drama\n{-(2**63)},Two,Drama\n")
    (tmp_path / "ratings.csv").write_text(
        f"userId,movieId,rating,timestamp\n{2**63 - 1},{2**53 + 1},4.5,2\n-1,{-(2**63)},3,1\n"
    )
    log = movielens.read_movielens(tmp_path)
    assert log.user.tolist() == [-1, 2**63 - 1] and log.movie.tolist() == [-(2**63), 2**53 + 1]


def test_a_movie_that_there_is_not(movielens: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n3,None,Drama\n")
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,3,4,2\n1,7,4,3\n")
    with pytest.raises(SystemExit, match=r"1 movies of ratings\.csv are not in movies\.csv, as 7"):
        movielens.read_movielens(tmp_path)


def test_clicks_in_the_format_of_taobao(user_behaviour: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "UserBehavior.csv"
    user_behaviour.write_clicks(path, seed=1, users=10, clicks=12, items=200, categories=5)
    lines = path.read_text().splitlines()
    assert all(re.fullmatch(r"\d+,\d+,\d+,(pv|buy),\d{10}", line) for line in lines)
    people = user_behaviour.read_clicks(path, users=7, shortest=12)
    assert len(people) == 7 and all(one.shape == (12, 2) and one.min() >= 1 for one in people)
    assert user_behaviour.read_clicks(path, users=7, shortest=13) == []


def test_clicks_of_a_person_come_in_the_order_of_time(user_behaviour: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "UserBehavior.csv"
    path.write_text("1,20,2,pv,1511544070\n1,10,1,pv,1511544010\n1,30,3,buy,1511544020\n2,40,4,pv,1511544030\n")
    (one,) = user_behaviour.read_clicks(path, users=5, shortest=2)
    assert one.tolist() == [[10, 1], [20, 2]]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("1,20,2,pv,7\n2,40,4,pv,8\n1,10,1,pv,9\n", "lines of user 1 do not stand together: sort the file by user"),
        ("1,20,2,pv,7\n1,0,2,pv,8\n", "user 1 has an item or a category 0"),
    ],
)
def test_clicks_that_would_be_taken_for_others(
    user_behaviour: ModuleType, tmp_path: Path, lines: str, says: str
) -> None:
    (tmp_path / "clicks.csv").write_text(lines)
    with pytest.raises(SystemExit, match=says):
        user_behaviour.read_clicks(tmp_path / "clicks.csv", users=5, shortest=1)
