from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.cli.main import main
from kvtools.clip import choose_rows
from kvtools.clip_policy import read_policy
from kvtools.decimal_histogram import DecimalHistogram
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import MissingDependencyError
from kvtools.histogram import FrequencyHistogram, VersionHistogram
from kvtools.migrate import write_tables
from kvtools.report import render_report, write_report
from kvtools.report_plots import growth_plot, norm_plot, parts_plot, version_plot, zipf_plot
from kvtools.stats import table_stats
from kvtools.table_answer import advise_table

pytest.importorskip("matplotlib")

VOID = {"meta", "br", "link", "img", "hr", "input"}
WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


class Page(HTMLParser):
    """Parses a page strictly: every element is closed in its turn; remembers elements, ids, attributes and texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def render(*checkpoints: Checkpoint, tables: tuple[str, ...] = ()) -> tuple[str, Page]:
    readers = checkpoints[-1].select(tables)
    html = render_report(checkpoints, [reader.schema for reader in readers], table_stats(readers, fine=True), when=WHEN)
    return html, Page(html)


def test_page_parses_and_stands_alone(sample_path: Path) -> None:
    html, page = render(open_checkpoint(sample_path))
    assert page.elements.count("svg") >= 10
    assert not {"script", "link", "img", "iframe", "object"} & set(page.elements)
    assert "http" not in html and "//" not in re.sub(r"<time[^>]*>", "", html).replace(str(sample_path), "")
    assert "@import" not in html
    for name, value in page.attributes:
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    assert "2026-01-02 03:04 UTC" in page.texts


def test_ids_are_unique_and_links_lead_somewhere(sample_path: Path) -> None:
    html, page = render(open_checkpoint(sample_path))
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = {value[1:] for name, value in page.attributes if name == "href"} | set(
        re.findall(r"url\(#([^)]*)\)", html)
    )
    assert targets and targets <= set(ids)


def test_pictures_take_the_colours_of_the_page(sample_path: Path) -> None:
    html, _ = render(open_checkpoint(sample_path))
    assert "prefers-color-scheme: dark" in html and "@media print" in html
    drawn = re.sub(r"<style>.*?</style>", "", html, flags=re.S)
    assert "var(--line-0)" in drawn and "var(--ink)" in drawn
    assert not re.findall(r"(?:fill|stroke): #(?!ffffff)[0-9a-f]{6}", drawn)


def test_names_are_escaped(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    name = "<b>&\"'$x_1$\nnext ☃ 表"
    sample = make_sample(name, slots=("<i>m",))
    checkpoint = open_checkpoint(save_plain(tmp_path / "<u>", table_tensors(sample, 2)))
    broken = dataclasses.replace(checkpoint, broken={"<s>": MissingDependencyError("<script>x</script>")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        html, page = render(checkpoint, broken)
    assert not {"b", "i", "u", "s", "script"} & {element for element in page.elements if element != "b"}
    assert "&lt;b&gt;&amp;&quot;&#x27;$x_1$\\nnext" in html
    assert "<b>&" not in html and "<i>m" not in html and "<script>" not in html
    assert "slot &lt;i&gt;m" in html


def test_missing_columns_are_said(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb", slots=())
    sample.freqs = sample.versions = None
    _, page = render(open_checkpoint(save_plain(tmp_path / "a", table_tensors(sample))))
    for text in (
        "This table records no frequencies.",
        "This table records no versions.",
        "This table has one part.",
    ):
        assert text in page.texts


def test_empty_tables_and_no_tables(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(save_plain(tmp_path / "a", table_tensors(make_sample("emb", rows=0), 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, page = render(checkpoint)
    assert "There is no row with a norm to plot." in page.texts
    _, page = render(open_checkpoint(save_plain(tmp_path / "b", {"w": np.zeros(3)})))
    assert "There are no key-value tables here." in page.texts


@pytest.mark.parametrize("case", ["zero", "nan", "tiny", "huge", "one"])
def test_odd_values_are_drawn_without_a_warning(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path, case: str
) -> None:
    sample = make_sample("emb", rows=1 if case == "one" else 20, value_dtype="float64")
    number = {"zero": 0.0, "nan": np.nan, "tiny": 1e-300, "huge": 1e300, "one": 1.0}[case]
    sample.values[:] = number
    sample.freqs[:] = {"zero": 0, "huge": 2**32 - 1}.get(case, 1)
    sample.versions[:] = {"zero": 0, "huge": 2**32 - 1}.get(case, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        render(open_checkpoint(save_plain(tmp_path / "a", table_tensors(sample, 2))))


def test_faults_stand_in_the_overview(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb")
    sample.values[3] = np.nan
    sample.keys[4] = sample.keys[5]
    html, _ = render(open_checkpoint(save_plain(tmp_path / "a", table_tensors(sample))))
    assert "1 rows with NaN or infinities have no place on this scale" in html
    assert '<span class="bad">rows with NaN: 1, repeated keys: 1</span>' in html


def test_growth_names_only_tables_of_the_last_checkpoint(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    checkpoints = [
        open_checkpoint(save_plain(tmp_path / f"model-{rows}", table_tensors(make_sample(name, rows=rows))))
        for name, rows in (("gone", 5), ("emb", 10), ("emb", 25))
    ]
    _, page = render(*checkpoints)
    assert "Growth by checkpoint" in page.texts and "gone" not in page.texts
    assert {"+10", "+15"} <= set(page.texts)


def test_plots_with_many_lines_bars_and_units() -> None:
    many = {f"_table {number}": [number, 2 * number] for number in range(30)}
    svg = growth_plot(["a", "b"], many, "bytes", binary=True).svg()
    assert "23 others" in svg and "_table 29" in svg
    assert parts_plot([5] * 1000) is not None and parts_plot([7]) is None and parts_plot([0, 0]) is not None
    for unit in ("seconds", "days", "steps", "unknown"):
        versions = VersionHistogram(unit)  # type: ignore[arg-type]
        assert version_plot(versions) is None
        versions.add(np.array([1, 20_000, 2**62]))
        assert version_plot(versions) is not None
    assert zipf_plot(FrequencyHistogram()) is None and norm_plot(DecimalHistogram()) is None


def test_same_input_gives_the_same_page(sample_path: Path) -> None:
    checkpoint = open_checkpoint(sample_path)
    pages = [re.sub(r"p\d+-", "", render(checkpoint)[0]) for _ in range(2)]
    assert pages[0] == pages[1]


def test_missing_matplotlib_is_named(sample_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"kvtools\[report\]"):
        write_report([open_checkpoint(sample_path)], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_only_the_largest_of_many_tables_have_plots(sample_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtools.report._TABLES_PLOTTED", 1)
    html, page = render(open_checkpoint(sample_path))
    assert page.elements.count("section") == 3 and page.elements.count("svg") == 6
    assert html.count("name this one with --table") == 2


def trained(name: str, rows: int, *, seed: int = 0, first: int = 0) -> ArrayTable:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, 4)).astype(np.float32)
    values[: rows // 10] = 0
    freqs = (1e5 / np.arange(1, rows + 1) ** 1.3).astype(np.int64) + rng.integers(0, 3, rows)
    versions = 1_700_000_000 - rng.exponential(4e6, rows).astype(np.int64)
    keys = np.arange(first, first + rows)
    return ArrayTable(name, keys, values, freqs=freqs, versions=versions, version_unit="seconds")


def write(folder: Path, *tables: ArrayTable) -> Checkpoint:
    write_tables(tables, folder / "model.safetensors", "safetensors")
    return open_checkpoint(folder / "model.safetensors")


def test_what_the_answer_advises_is_what_clip_does(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, trained("large*", 9000), trained("small", 3000, seed=1))
    html, page = render(checkpoint)
    assert list(dict.fromkeys(text for text in page.texts if text in ("large*", "small"))) == ["large*", "small"]
    assert html.index('class="answer"') < html.index("<svg")
    commands = [text for text in page.texts if text.startswith("kvtools clip ")]
    said = {
        line: [int(number.replace(",", "")) for number in re.findall(r"Leave out ([\d,]+) rows", line)]
        for line in page.texts
        if "Leave out" in line
    }
    assert len(commands) >= 6 and any("--min-freq" in command for command in commands)
    for table in checkpoint.tables.values():
        stats = table_stats([table], fine=True)[table.schema.name]
        advice = advise_table(table.schema, stats, str(checkpoint.path))
        assert {one.threshold.criterion for one in advice if one.threshold} == {"freq", "norm", "age"}
        for one in advice:
            assert one.threshold is not None and one.command in commands
            (tmp_path / "p.toml").write_text("\n".join(['[[tables]]\nname = "*"', *one.threshold.policy]))
            choice = choose_rows(table, read_policy(str(tmp_path / "p.toml")).criteria("x"))
            assert choice.cut == one.threshold.rows and choice.bytes_saved == one.bytes
            assert [choice.cut] in said.values()
            if one.threshold.criterion == "freq":
                assert choice.lookups and choice.lookups_missed == one.threshold.lookups <= 0.01 * choice.lookups
    both = next(text for text in page.texts if "POLICY" in text)
    assert 'name = "large[*]"' in both and 'name = "small"' in both


def test_nothing_to_do_and_what_is_wrong(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    fine = ArrayTable("fine", np.arange(500), rng.normal(0.1, 0.1, (500, 4)).astype(np.float32))
    _, page = render(write(tmp_path / "a", fine))
    assert any(text.startswith("Nothing stands out") for text in page.texts)
    values = rng.standard_normal((500, 4)).astype(np.float32)
    values[7] = np.nan
    bad = ArrayTable("bad", np.arange(500), values, part_rows=[450, 50])
    _, page = render(write(tmp_path / "b", bad))
    assert "It has 1 rows with NaN: repair says what it would do." in " ".join(page.texts)
    assert any(text.startswith("kvtools repair ") and text.endswith("--table=bad --dry-run") for text in page.texts)


def test_what_changed_since_another_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = trained("emb", 2000), trained("emb", 2000, first=300)
    shifted = ArrayTable("emb", new.to_numpy().keys, 3 * new.to_numpy().values, freqs=new.to_numpy().freqs)
    before = write(tmp_path / "old", old, trained("gone", 50))
    after = write(tmp_path / "new", shifted, trained("came", 60))
    output = tmp_path / "since.html"
    assert main(["report", str(after.path), "--compare", str(before.path), "--html", str(output)]) == 0
    page = Page(output.read_text())
    text = " ".join(page.texts)
    assert "300 rows came, 300 went, 1,700 changed; new: table came; gone: table gone." in text
    assert "300 rows came and 300 went; of the 1,700 that stayed 1,700 changed" in text
    medians = [float(number) for number in re.findall(r"median norm went from ([\d.]+) to ([\d.]+\d)", text)[0]]
    assert medians[1] == pytest.approx(3 * medians[0], rel=0.02)
    assert "Did norms drift?" in page.texts and "rows that moved furthest: key" in page.texts
