"""`kvtools explore --terminal`, driven as a person does: by keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("textual")
from textual.widgets import DataTable

from kvtools.array_table import ArrayTable
from kvtools.explore.command import ClipSource, clip_command
from kvtools.explore.survey import Detail, survey_tables
from kvtools.explore.terminal import Explorer

NAMES = ["large [b]", "small\u202e", "empty"]


def explorer() -> Explorer:
    rng = np.random.default_rng(3)
    tables = [
        ArrayTable(
            name,
            np.arange(rows) - 3,
            rng.standard_normal((rows, 4)).astype(np.float32),
            freqs=rng.zipf(1.5, rows).clip(max=10**6),
            versions=rng.integers(1, 9000, rows),
            version_unit="steps",
        )
        for name, rows in zip(NAMES, (2000, 300, 0), strict=True)
    ]
    surveys = list(survey_tables(tables, [Detail(points=0, neighbours=0, hot=20)] * 3))
    return Explorer(tables, surveys, ClipSource.of("model.h5"), "Tables of model.h5")


def drive(steps: Callable[[Explorer, Any], Awaitable[None]], size: tuple[int, int] = (120, 50)) -> Explorer:
    app = explorer()

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await steps(app, pilot)

    asyncio.run(run())
    return app


def text(app: Explorer, name: str) -> str:
    return str(app.query_one(f"#{name}").render())


def cells(app: Explorer, name: str) -> list[list[str]]:
    grid = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in grid.get_row_at(row)] for row in range(grid.row_count)]


def test_tables_thresholds_and_the_command_by_keys() -> None:
    copied: list[str] = []

    async def steps(app: Explorer, pilot: Any) -> None:
        app.copy_to_clipboard = copied.append  # type: ignore[method-assign]
        assert [line[:2] for line in cells(app, "tables")] == [
            ["large [b]", "2,000"],
            ["small\\u202e", "300"],
            ["empty", "0"],
        ]
        await pilot.press("c")
        assert copied == []
        await pilot.press("enter", "right", "right", "right", "left", "down", "right")
        survey = app.surveys[0]
        assert app.states[0] == (2, 1, 0)
        cut = 2000 - survey.cuts.kept((2, 1, 0)).rows
        assert f"Cuts {cut:,} of 2,000 rows" in text(app, "saved") and "of the table's lookups" in text(app, "saved")
        expected = clip_command(app.source, [("large [b]", survey.cuts.chosen((2, 1, 0)))], "model-clipped.h5")
        assert text(app, "command") == expected
        await pilot.press("c")
        assert copied == [expected]
        # Of the next table, too: a policy then says what holds for which.
        app.query_one("#tables").focus()
        await pilot.press("down", "enter", "end")
        assert app.chosen == 1 and app.states[1][0] == len(app.surveys[1].cuts.axes[0])
        assert text(app, "command") == app.command() and "<<'POLICY'" in app.command()
        assert cells(app, "tables")[1][3] and cells(app, "tables")[0][3] and not cells(app, "tables")[2][3]
        await pilot.press("d")
        assert "--dry-run" in app.command() and "model-clipped" not in app.command()
        await pilot.press("r")
        assert app.command() == "" and "Nothing is cut" in text(app, "saved")
        app.query_one("#tables").focus()
        await pilot.press("down")
        assert "There are no rows." in text(app, "axis-0")
        await pilot.press("s", "s")
        assert [line[0] for line in cells(app, "tables")] == ["empty", "large [b]", "small\\u202e"]
        await pilot.press("q")

    app = drive(steps)
    assert app.return_value == copied[0]


def test_neighbours_of_a_hot_key_are_those_of_numpy() -> None:
    async def steps(app: Explorer, pilot: Any) -> None:
        hot = cells(app, "hot")
        rows = app.tables[0].to_numpy()
        assert rows.freqs is not None and rows.values is not None
        best = np.lexsort((rows.keys, -rows.freqs))[:20]
        assert [line[0] for line in hot] == [str(key) for key in rows.keys[best]]
        app.query_one("#hot").focus()
        await pilot.press("down", "enter")
        await app.workers.wait_for_complete()
        await pilot.pause()
        values = rows.values.astype(np.float64)
        values /= np.linalg.norm(values, axis=1)[:, None]
        cosines = values @ values[best[1]]
        cosines[best[1]] = -2
        nearest = np.argsort(-cosines)[:10]
        assert cells(app, "near") == [[str(rows.keys[at]), f"{cosines[at]:.4f}"] for at in nearest]
        assert f"key {rows.keys[best[1]]}" in text(app, "near-title")

    drive(steps)


@pytest.mark.parametrize("size", [(60, 20), (200, 60)])
def test_any_size_of_terminal(size: tuple[int, int]) -> None:
    async def steps(app: Explorer, pilot: Any) -> None:
        await pilot.press("enter", "right")
        assert app.command().startswith("kvtools clip model.h5 model-clipped.h5 --table='large [b]' --min-freq ")

    drive(steps, size)


def test_no_tables() -> None:
    async def run() -> None:
        app = Explorer([], [], ClipSource.of("a"), "nothing")
        async with app.run_test() as pilot:
            await pilot.press("c", "s", "r", "d")
            assert "no key-value tables" in text(app, "about")

    asyncio.run(run())
