"""What people clicked at a shop, in the format of Taobao's UserBehavior.csv: reads it, and writes a generated one.

A line is user,item,category,behaviour,timestamp, without a line of names; behaviours are pv (a click), cart, fav, buy.
Lines of a person stand together. Numbers are 1 and up, so 0 stands for no item. NumPy only, seeded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_INTERESTS = 3  # categories that a person cares about


def read_clicks(path: Path, users: int, shortest: int) -> list[np.ndarray]:
    """The clicks of the first `users` people in the file who have `shortest` or more.

    Returns:
        For each of them an array, int64 [clicks, 2], of items and their categories in the order of time.

    Leaves the program where lines of a person do not stand together, or an item or a category is 0.
    """
    people, met = [], set()
    with path.open() as file:
        for user, lines in itertools.groupby(_fields(file), key=lambda fields: fields[0]):
            if user in met:
                raise SystemExit(f"{path}: lines of user {user} do not stand together: sort the file by user")
            met.add(user)
            clicks = sorted((int(time), int(item), int(kind)) for _, item, kind, what, time in lines if what == "pv")
            if any(0 in click[1:] for click in clicks):
                raise SystemExit(f"{path}: user {user} has an item or a category 0, which stands for none")
            if len(clicks) >= shortest:
                people.append(np.array([click[1:] for click in clicks], np.int64))
            if len(people) == users:
                break
    return people


def _fields(lines: Iterator[str]) -> Iterator[list[str]]:
    for line in lines:
        yield line.rstrip().split(",")


def write_clicks(path: Path, seed: int, users: int, clicks: int, items: int = 4000, categories: int = 100) -> None:
    """Writes the behaviour of `users` people who click `clicks` times each.

    A person cares about a few categories, and in each about items of one of two tastes; now it is the one, now the
    other. So what was clicked before says what will be, as far as it is of that category.
    """
    rng = np.random.default_rng(seed)
    category = rng.integers(0, categories, items)
    taste = rng.integers(0, 2, items)
    popular = (np.arange(items) + 20.0) ** -0.7
    of = {  # items of each category and taste, and how often they are seen
        (kind, one): np.flatnonzero((category == kind) & (taste == one)) for kind in range(categories) for one in (0, 1)
    }
    chances = {key: popular[some] / popular[some].sum() for key, some in of.items() if len(some)}
    groups = list(chances)
    with path.open("w") as file:
        for user in range(users):
            cares = [groups[one] for one in rng.choice(len(groups), _INTERESTS, replace=False)]
            # What somebody clicks comes in bouts of one interest.
            bouts = rng.integers(0, _INTERESTS, clicks)
            stays = rng.random(clicks) < 0.6
            time = 1_511_544_000 + np.sort(rng.integers(0, 777_600, clicks))
            now = bouts[0]
            for at in range(clicks):
                now = now if stays[at] else bouts[at]
                group = cares[now]
                item = of[group][0] if len(of[group]) == 1 else rng.choice(of[group], p=chances[group])
                if rng.random() < 0.1:  # by chance
                    item = rng.integers(items)
                file.write(f"{user + 1},{item + 1},{category[item] + 1},pv,{time[at]}\n")
                if rng.random() < 0.05:
                    file.write(f"{user + 1},{item + 1},{category[item] + 1},buy,{time[at] + 60}\n")
