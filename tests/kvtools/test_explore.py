"""`kvtools explore`: what it tells of thresholds is what clip then does, to the row; the page is inert and bounded."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import re
import shlex
import subprocess
import weakref
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import Tab, browser, needs_chromium

import kvtools
from kvtools.array_table import ArrayTable
from kvtools.cli.main import main
from kvtools.clip import choose_rows
from kvtools.clip_policy import read_policy
from kvtools.errors import BadInputError
from kvtools.explore.command import ClipSource, clip_command, policy_entry, shell_quoted
from kvtools.explore.explore import write_page
from kvtools.explore.page import page_details, render_page
from kvtools.explore.survey import Detail, TableSurvey, survey_table, survey_tables
from kvtools.migrate import write_tables

NOW = 1_760_000_000
HOSTILE = [
    "</script><script>document.body.dataset.hurt=1</script>",
    "<img src=x onerror=document.body.dataset.hurt=1>",
    'it\'s "quoted" $(touch hurt) `touch hurt` \\',
    "right\u202eto left",
    "line\nbreak\t{{data}} \u2028 --dry-run",
    "a[1]*",
    "-rf",
]


def table(name: str = "user", rows: int = 3000, unit: str = "seconds", seed: int = 0, **changes: Any) -> ArrayTable:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, 8)) * rng.lognormal(-3, 1, (rows, 1))).astype(np.float32)
    values[: rows // 100] = 0
    values[rows // 2 : rows // 2 + 3] = np.nan
    values[rows // 2 + 3 : rows // 2 + 5, 1] = np.inf
    ages = rng.exponential({"seconds": 9e5, "days": 20, "steps": 4e3}[unit], rows).astype(np.int64)
    versions = {"seconds": NOW, "days": NOW // 86400, "steps": 30_000}[unit] - ages
    versions[::50] = 0
    columns: dict[str, Any] = {
        "freqs": rng.zipf(1.6, rows).clip(max=10**9).astype(np.int64),
        "versions": versions.clip(0).astype(np.int64),
        "version_unit": unit,
        "part_rows": [rows // 3, rows - rows // 3],
        "slots": {"Adam.m": np.zeros((rows, 8), np.float32)},
    }
    return ArrayTable(name, rng.permutation(np.arange(rows) - 5), values, **(columns | changes))


def states(shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    some = [sorted({0, 1, length // 2, length - 1}) for length in shape]
    return list(itertools.product(*some))  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["seconds", "days", "steps"])
def test_what_thresholds_keep_together_is_what_clip_keeps(unit: str, tmp_path: Path) -> None:
    one = table(unit=unit)
    survey = survey_table(one, Detail(percentiles=(5, 20, 50, 80, 95)))
    assert all(survey.cuts.axes)
    for state in states(survey.cuts.counts.shape):
        chosen = survey.cuts.chosen(state)
        (tmp_path / "p.toml").write_text(
            "\n".join([policy_entry("user"), *(line for c in chosen for line in c.policy)])
        )
        choice = choose_rows(one, read_policy(str(tmp_path / "p.toml")).criteria("user"))
        kept = survey.cuts.kept(state)
        assert (kept.rows, survey.row_bytes) == (choice.kept, choice.row_bytes), chosen
        assert choice.lookups is not None and choice.lookups_missed is not None
        assert kept.lookups == choice.lookups - choice.lookups_missed
    for axis in survey.cuts.axes:  # what each cuts by itself, and that each cuts more than the one before
        alone = [choose_rows(one, read_alone(threshold.policy, tmp_path)).cut for threshold in axis]
        assert [threshold.rows for threshold in axis] == alone == sorted(set(alone))


def read_alone(policy: tuple[str, ...], folder: Path) -> Any:
    (folder / "p.toml").write_text("\n".join([policy_entry("user"), *policy]))
    return read_policy(str(folder / "p.toml")).criteria("user")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"freqs": None, "versions": None, "version_unit": "unknown"}, [0, 1, 0]),
        ({"version_unit": "unknown"}, [1, 1, 0]),
        ({"freqs": np.full(3000, 2**64 - 1, np.uint64)}, [0, 1, 1]),
        ({"versions": np.full(3000, NOW)}, [1, 1, 0]),
    ],
)
def test_criteria_without_thresholds(changes: dict[str, Any], expected: list[int]) -> None:
    survey = survey_table(table(**changes), Detail(percentiles=(10, 50)))
    assert [int(bool(axis)) for axis in survey.cuts.axes] == expected
    assert survey.cuts.kept((0, 0, 0)).rows == 3000
    page = render_page([survey], ClipSource.of("a"), title="t", about="a")
    why = data_of(page)["tables"][0]["why"]
    assert [int(not reason) for reason in why] == expected


def test_no_survey_is_kept_for_the_page() -> None:
    seen: list[weakref.ref[TableSurvey]] = []

    def surveys() -> Iterator[TableSurvey]:
        for survey in survey_tables([table(str(number), rows=20) for number in range(50)], [Detail()] * 50, workers=1):
            seen.append(weakref.ref(survey))
            assert sum(one() is not None for one in seen) <= 2
            yield survey

    page = render_page(surveys(), ClipSource.of("a"), title="t", about="a")
    assert len(data_of(page)["tables"]) == 50


def test_odd_tables_are_surveyed() -> None:
    none = np.empty((0, 3), np.float32)
    odd = [
        ArrayTable("empty", np.empty(0, np.int64), none),
        ArrayTable("one", np.array([2**64 - 1], np.uint64), np.float32([[1]])),
        ArrayTable("nan", np.arange(3), np.full((3, 2), np.nan, np.float32)),
        ArrayTable("huge", np.arange(3), np.array([[1e300], [1e-300], [np.inf]])),
    ]
    surveys = list(survey_tables(odd, [Detail()] * 4))
    page = render_page(surveys, ClipSource.of("a"), title="t", about="a")
    tables = {one["name"]: one for one in data_of(page)["tables"]}
    assert tables["one"]["hot"]["keys"] == [str(2**64 - 1)]
    assert (surveys[2].non_finite_rows, surveys[3].non_finite_rows, surveys[2].near) == (3, 1, {})
    assert [one.cuts.kept((0, 0, 0)).rows for one in surveys] == [0, 1, 3, 3]


def test_hot_keys_neighbours_and_sample_are_those_of_numpy() -> None:
    one = table()
    survey = survey_table(one, Detail(points=200, asked=4, neighbours=5))
    rows = one.to_numpy()
    assert rows.freqs is not None and rows.values is not None
    hot = np.lexsort((rows.keys, -rows.freqs))[:10]
    assert survey.hot.keys.tolist() == rows.keys[hot].tolist()
    finite = np.isfinite(rows.values).all(axis=1)
    norms = np.linalg.norm(rows.values.astype(np.float64), axis=1)
    asked = [int(key) for key in survey.near]
    assert len(asked) >= 12
    for key in asked[:3] + asked[-2:]:
        at = int(np.flatnonzero(rows.keys == key)[0])
        with np.errstate(all="ignore"):
            cosines = rows.values.astype(np.float64) @ rows.values[at] / norms / norms[at]
        cosines[~finite | (norms == 0)] = -2
        cosines[at] = -2
        best = np.argsort(-cosines, kind="stable")[:5]
        assert survey.near[key][0].tolist() == rows.keys[best].tolist()
        np.testing.assert_allclose(survey.near[key][1], cosines[best], rtol=1e-6)
    assert len(survey.sample.keys) == 200 and set(survey.sample.keys.tolist()) <= set(rows.keys.tolist())
    points = survey.projection.points
    assert points[:, 0].var() >= points[:, 1].var() and abs(np.corrcoef(points.T)[0, 1]) < 1e-6


class Page(HTMLParser):
    """The elements of a page, their attributes, and what each script holds."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.last = ""
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.last = tag
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self.last = ""

    def handle_data(self, data: str) -> None:
        if self.last in self.inside:
            self.inside[self.last][-1] += data


def data_of(page: str) -> Any:
    return json.loads(Page(page).inside["script"][0])


def test_the_page_is_one_inert_file_whatever_tables_are_called() -> None:
    surveys = survey_tables([table(name, rows=60) for name in HOSTILE], [Detail(points=9)] * len(HOSTILE))
    broken = {"<s>torn": BadInputError("</script> is wrong")}
    text = render_page(surveys, ClipSource.of("a b"), title=HOSTILE[0], about=HOSTILE[3], broken=broken)
    page = Page(text)
    assert [tag for tag, _ in page.elements if tag in ("script", "style", "img", "link", "iframe", "s")] == [
        "style",
        "script",
        "script",
    ]
    assert not any(name.startswith("on") or name in ("src", "href") for _, attrs in page.elements for name in attrs)
    policy = next(attrs["content"] for tag, attrs in page.elements if "http-equiv" in attrs)
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy
    for inside in (page.inside["style"][0], page.inside["script"][1]):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'" in policy
    assert not re.search(r"(https?:)?//[\w-]+\.\w", text.replace("http://www.w3.org/2000/svg", ""))
    assert [one["name"] for one in json.loads(page.inside["script"][0])["tables"]][3] == "right\\u202eto left"
    assert "\u202e" not in text and "\u2028" not in text


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_one_word_of_a_shell_and_matches_itself_alone(name: str, tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-c", f"printf %s {shell_quoted(name)}"], capture_output=True, cwd=tmp_path)
    assert done.stdout.decode() == name and not [*tmp_path.iterdir()]
    (tmp_path / "p.toml").write_text(policy_entry(name) + "\nmin-freq = 2")
    policy = read_policy(str(tmp_path / "p.toml"))
    assert policy.criteria(name).min_freq == 2 and policy.unmatched([name]) == []
    assert policy.criteria("a1x").empty and shell_quoted(name).isprintable()


def test_places_beside_what_is_clipped() -> None:
    assert ClipSource.of("a/model.ckpt-7").output == "a/model-clipped.ckpt-7"
    assert ClipSource.of("tables.h5").output == "tables-clipped.h5"
    assert ClipSource.of("checkpoints/").output == "checkpoints-clipped"
    assert ClipSource.of("s3://b/x.parquet").output == "s3://b/x-clipped.parquet"
    redis = ClipSource.of("redis://:secret@cache/0", "redis")
    assert (redis.path, redis.options) == ("redis://cache/0", ("--to", "parquet"))


def test_a_page_of_a_thousand_tables_is_bounded() -> None:
    details = page_details(1000)
    kinds = {detail: survey_table(table(rows=6000), detail) for detail in set(details)}
    surveys = []
    for number, detail in enumerate(details):
        schema = dataclasses.replace(kinds[detail].schema, name=f"scope_{number}/table", bytes=2000 - number)
        surveys.append(dataclasses.replace(kinds[detail], schema=schema))
    page = render_page(surveys, ClipSource.of("a"), title="t", about="a")
    assert [one["name"] for one in data_of(page)["tables"]] == [f"scope_{number}/table" for number in range(1000)]
    assert len(page) < 5_000_000


def written(folder: Path, tables: list[ArrayTable]) -> Path:
    path = folder / "model.safetensors"
    write_tables(tables, path, "safetensors")
    return path


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [table(), table("item", 500)])
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    assert main(["explore", str(path), "--open"]) == 0
    assert capsys.readouterr().out == "wrote explore.html\n"
    assert opened == [(tmp_path / "explore.html").as_uri()]
    assert main(["explore", str(path)]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["explore", str(path), "--output", "b.html", "--table", "it*", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tables"] == ["item"] and told["bytes"] == (tmp_path / "b.html").stat().st_size
    assert main(["explore", str(path), "--output", "c.html", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would write c.html\n" and not (tmp_path / "c.html").exists()
    for wrong in (["--terminal", "--open"], ["--terminal"], ["--points", "-1"], ["--version-unit", "weeks"]):
        assert main(["explore", str(path), *wrong]) == 2
    monkeypatch.setitem(__import__("sys").modules, "kvtools.explore.terminal", None)
    assert main(["explore", str(path), "--terminal"]) == 1
    assert "kvtools[explore]" in capsys.readouterr().err


def shown(tab: Tab) -> dict[str, Any]:
    return {name: int(number) for name, number in tab.value("({...document.getElementById('saved').dataset})").items()}


def slide(tab: Tab, axis: int, step: int) -> None:
    tab.value(
        f"(() => {{ const e = document.querySelector('#axis-{axis} input'); e.value = {step};"
        " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


@needs_chromium
def test_the_command_that_a_browser_copies_cuts_what_its_page_says(tmp_path: Path) -> None:
    names = ["user", *HOSTILE]
    path = written(tmp_path, [table(name, 900 - 10 * at, seed=at) for at, name in enumerate(names)])
    write_page(kvtools.open(path), tmp_path / "page.html", source=ClipSource.of(path.name))
    with browser(tmp_path / "browser") as tab:
        tab.ask(
            "Page.addScriptToEvaluateOnNewDocument",
            source="if (navigator.clipboard) navigator.clipboard.writeText = async (t) => { window.copied = t; };",
        )
        tab.open((tmp_path / "page.html").as_uri())
        assert tab.value("document.body.dataset.ready") == "yes" and tab.value("document.body.dataset.hurt") is None
        said = {}
        for number, steps in ((0, (3, 2, 4)), (1, (2, 0, 0)), (4, (0, 3, 0)), (5, (2, 0, 0)), (6, (1, 1, 0))):
            tab.click(f"#tables tbody tr:nth-child({number + 1})")
            for axis, step in enumerate(steps):
                slide(tab, axis, step)
            said[names[number]] = shown(tab)
            tab.click("#copy")
            if number == 0:  # a single table is named by options, several by a policy
                check_copied(tab.value("window.copied"), said, tmp_path, "alone")
        check_copied(tab.value("window.copied"), said, tmp_path, "several")
        totals = [tab.value(f"document.getElementById('all-{what}').textContent") for what in ("cut", "saved")]
        assert totals[0] == f"{sum(one['cut'] for one in said.values()):,}"
        # The state is in the address, and so on the page again.
        address, command = tab.value("[location.href, document.getElementById('command').textContent]")
        tab.open("about:blank#other")
        tab.open(address)
        assert tab.value("document.getElementById('command').textContent") == command
        tab.click("#hot tbody button")
        assert tab.value("document.querySelectorAll('#near li').length") == 8
        assert tab.value("document.querySelectorAll('#plot circle').length") > 500
        assert tab.value("document.querySelectorAll('#tables tbody tr').length") == 8
        assert tab.faults == [] and not (tmp_path / "hurt").exists()


def check_copied(command: str, said: dict[str, dict[str, int]], folder: Path, output: str) -> None:
    """Run a command as a shell has it, and compare its account with what the page said."""
    script = f'kvtools() {{ "{__import__("sys").executable}" -m kvtools.cli.main "$@" --force --json; }}\n{command}\n'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    account = {one["table"]: one for one in json.loads(done.stdout)["clipped"]}
    assert set(account) == set(said)
    for name, told in said.items():
        one = account[name]
        assert (told["cut"], told["kept"], told["saved"]) == (one["cut"], one["kept"], one["bytes_saved"])
        assert told["missed"] == one["lookups_missed"] and told["cut"] > 0
    clipped = kvtools.open(folder / "model-clipped.safetensors")
    assert {name: clipped.table(name).rows for name in said} == {name: told["kept"] for name, told in said.items()}


def test_options_of_the_source_are_in_the_command() -> None:
    survey = survey_table(table(), Detail())
    source = ClipSource.of("a.npz", "npz", ["--version-unit", "days"])
    chosen = survey.cuts.chosen((1, 0, 0))
    words = shlex.split(clip_command(source, [("user", chosen)], None))
    assert words == [
        "kvtools",
        "clip",
        "a.npz",
        "--table=user",
        *chosen[0].options,
        "--version-unit",
        "days",
        "--dry-run",
    ]


def test_a_store_is_explored_and_named_by_its_url(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe_file("/explored/model.safetensors", written(tmp_path, [table(rows=200)]).read_bytes())
    assert main(["explore", "memory://explored/model.safetensors", "--output", "memory://explored/page.html"]) == 0
    text = memory.cat_file("/explored/page.html").decode()
    assert data_of(text)["command"]["path"] == "memory://explored/model.safetensors"
    assert "memory://explored/model.safetensors (safetensors)" in text and str(tmp_path) not in text
