"""Advice: what it says would be saved and lost is what the commands then do, to the row and byte, read back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtools
from kvtools.advise import advise, described
from kvtools.array_table import ArrayTable
from kvtools.auc import area_under_curve, dot_products, scorer_named
from kvtools.clip import write_chosen
from kvtools.clip_policy import choose_all, read_policy
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import BadInputError, UsageError
from kvtools.export import export_saved_model
from kvtools.id_log import open_log
from kvtools.migrate import write_tables
from kvtools.policy_text import Entry, pattern_of, policy_text
from kvtools.row_errors import row_errors
from kvtools.survey_rows import survey_rows

DAY = 86_400
NEWEST = 1_700_000_000


def table(name: str, rows: int, dim: int, *, seed: int = 0, **without: bool) -> ArrayTable:
    rng = np.random.default_rng(seed)
    freqs = rng.zipf(1.5, rows) % 5000
    values = rng.normal(size=(rows, dim)).astype(np.float32) * np.minimum(1, freqs / 7)[:, None].astype(np.float32)
    # What is looked up seldom is old as well.
    versions = NEWEST - (rng.exponential(90 * DAY, rows) / (1 + np.log1p(freqs))).astype(np.int64)
    versions[:2] = NEWEST, 0
    keys = rng.permutation(rows * 3)[:rows].astype(np.int64)
    columns: dict[str, Any] = {"freqs": freqs.astype(np.int64), "versions": versions, "version_unit": "seconds"}
    for column in without:
        columns.pop(column)
        if column == "versions":
            columns.pop("version_unit")
    slots = {"Adam.m": values / 2, "Adam.v": values**2}
    return ArrayTable(name, keys, values, slots=slots, **columns)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("model") / "model.ckpt-100"
    write_tables([table("user", 3000, 16), table("ads/item[1]", 800, 32, seed=1)], str(path), "tfplugin")
    return kvtools.open(str(path))


def rows_of(checkpoint: Checkpoint, name: str) -> dict[int, np.ndarray]:
    chunks = checkpoint.table(name).chunks()
    return {int(key): value for chunk in chunks for key, value in zip(chunk.keys, chunk.values, strict=True)}


def bytes_read(checkpoint: Checkpoint, name: str) -> int:
    chunks = list(checkpoint.table(name).chunks())
    columns = [array for chunk in chunks for array in (chunk.keys, chunk.values, chunk.freqs, chunk.versions)]
    return sum(array.nbytes for array in [*columns, *(slot for chunk in chunks for slot in chunk.slots.values())])


@pytest.mark.parametrize("budget", [None, 60_000])
def test_clip_saves_and_loses_what_advice_says(model: Checkpoint, tmp_path: Path, budget: int | None) -> None:
    advice = advise(model, goal="training", budget=budget, max_loss=0.05)
    assert advice.over_budget == (budget is not None)
    (tmp_path / "policy.toml").write_text(advice.policy_text())
    policy = read_policy(str(tmp_path / "policy.toml"))
    choices = choose_all(model, policy)
    write_chosen(model, choices, tmp_path / "out.ckpt")
    written = kvtools.open(str(tmp_path / "out.ckpt"))
    assert budget is None or advice.bytes_after <= budget
    for told in advice.tables:
        schema = written.table(told.table).schema
        assert (told.kept, told.bytes_after) == (schema.rows, bytes_read(written, told.table))
        assert (told.rows, told.bytes) == (model.table(told.table).rows, bytes_read(model, told.table))
        freqs = dict(
            zip(*(model.table(told.table).to_numpy().__dict__[c].tolist() for c in ("keys", "freqs")), strict=True)
        )
        left = rows_of(written, told.table)
        missed = sum(freq for key, freq in freqs.items() if key not in left)
        assert (told.lookups, told.lookups_missed) == (sum(freqs.values()), missed)
        assert told.kept < told.rows
        assert told.loss is not None and (budget is not None or told.loss <= 0.05)
        training = policy.training(told.table)
        assert training.described() == {
            name: value if name != "expire-after" else f"{int(value[:-1]) * DAY}s"
            for name, value in told.fields.items()
            if name in ("admission", "expire-after", "max-capacity", "eviction")
        }
        assert (training.max_capacity == told.kept) == (budget is not None)


def test_an_export_saves_what_advice_says_rounded_and_read_back(model: Checkpoint, tmp_path: Path) -> None:
    advice = advise(model, max_error=0.006)
    (tmp_path / "policy.toml").write_text(advice.policy_text())
    policy = read_policy(str(tmp_path / "policy.toml"))
    dtypes = policy.dtypes([*model.tables])
    assert dtypes == {"user": "int8", "ads/item[1]": "int8"}
    exports = {
        export.name: export for export in export_saved_model(model, tmp_path / "out", policy=policy, dtype=dtypes)
    }
    written = kvtools.open(str(tmp_path / "out"))
    for told in advice.tables:
        export = exports[told.table]
        assert (told.kept, told.bytes_after, told.bytes_saved) == (export.rows, export.bytes, export.bytes_saved)
        assert (told.lookups, told.lookups_missed) == (export.lookups, export.lookups_missed)
        before, after = rows_of(model, told.table), rows_of(written, told.table)
        assert len(after) == told.kept
        # The error is that of all rows, of which those that stay are a part: the same type, the same rounding.
        back = {error.dtype: error for error in row_errors(np.stack([before[key] for key in after]))}["int8"]
        differences = np.stack([after[key] - before[key] for key in after]).astype(np.float64)
        power = sum(float((before[key].astype(np.float64) ** 2).sum()) for key in after)
        assert math.isclose(back.rms, math.sqrt(float((differences**2).sum()) / power), rel_tol=1e-9)
        assert told.error is not None and 0 < told.error.rms <= 0.006 and told.error.mean_cosine > 0.999


def test_what_thresholds_cut_together_is_what_clipping_cuts(model: Checkpoint) -> None:
    reader = model.table("user")
    survey = survey_rows(reader, norms=(0.5, 1.5))
    chunk = reader.to_numpy()
    assert chunk.freqs is not None and chunk.versions is not None and chunk.values is not None
    norms = np.linalg.norm(chunk.values.astype(np.float64), axis=1)
    cuts = survey.cuts()
    assert len(cuts) == 16 * (len(survey.thresholds.ages) + 1) * 3 and len(survey.thresholds.ages) > 2
    for cut in cuts:
        kept = np.ones(len(chunk), bool)
        if cut.freq is not None:
            kept &= chunk.freqs >= cut.freq
        if cut.age is not None:
            versions = chunk.versions.astype(np.int64)
            kept &= (versions >= NEWEST - cut.age) | (versions == 0)
        if cut.norm is not None:
            kept &= norms >= cut.norm
        assert (cut.rows, cut.lookups) == (int((~kept).sum()), int(chunk.freqs[~kept].sum()))
    frequencies = chunk.freqs.astype(np.int64)
    for least, waited in survey.waited.items():
        assert waited == sum(min(int(freq), least) - 1 for freq in frequencies if freq)
        assert survey.rare[least] == int((frequencies < least).sum())


@pytest.fixture(scope="module")
def log(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rng = np.random.default_rng(3)
    users = model.table("user").all_keys()[::2]
    items = model.table("ads/item[1]").all_keys()
    ids = users[rng.zipf(1.4, 4000) % len(users)]
    ids[::10] = -5  # which no table has
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    columns = {"user": ids, "seen": items[rng.integers(0, len(items), 4000)], "clicked": rng.random(4000) < 0.3}
    parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def test_a_log_tells_what_is_lost(model: Checkpoint, log: str, tmp_path: Path) -> None:
    from pyarrow import parquet

    told = {table.table: table for table in advise(model, goal="training", log=open_log(log), max_loss=0.02).tables}
    policy = read_policy_of(advise(model, goal="training", log=open_log(log), max_loss=0.02).policy_text(), tmp_path)
    (user,) = choose_all(model, policy, tables=["user"])
    ids = parquet.read_table(log)["user"].to_numpy()
    keys = model.table("user").all_keys()
    kept = keys[user.mask.get(0, 0, len(keys))]
    found = np.isin(ids, keys)
    assert told["user"].lookups == int(found.sum()) < 4000
    assert told["user"].lookups_missed == int((found & ~np.isin(ids, kept)).sum())
    assert told["user"].loss <= 0.02 and told["user"].kept < told["user"].rows
    never = len(keys) - len(np.intersect1d(ids, keys))
    assert told["user"].notes == [f"the log looks {never:,} of its 3,000 rows up never"]
    # The log names no column for the other table: its frequencies count.
    assert told["ads/item[1]"].lookups == int(model.table("ads/item[1]").to_numpy().freqs.sum())


def test_a_table_without_a_column_of_the_log_is_told(model: Checkpoint, log: str) -> None:
    advice = advise(model, goal="training", log=open_log(log))
    told = {table.table: table for table in advice.tables}
    assert {name: table.counted_by for name, table in told.items()} == {"user": "log", "ads/item[1]": "freq"}
    assert told["ads/item[1]"].notes == [
        "the log has no column of it: its lookups are counted by the checkpoint's frequencies;"
        " --column COLUMN=ads/item[1] says which it is"
    ]
    assert advice.unused_columns == ["seen"] and advice.loss is None
    assert advice.notes == [
        "the log's column 'seen' is not used: no table has that name; --column seen=TABLE says whose ids it has",
        "lookups lost of all tables are not told: those of 'user' are counted by the log, those of 'ads/item[1]' by"
        " the checkpoint's frequencies, which do not add up",
    ]
    record = described(advice)
    assert (record["counted_by"], record["unused_columns"], record["lookups_lost"]) == (["freq", "log"], ["seen"], None)
    assert [table["counted_by"] for table in record["tables"]] == [table.counted_by for table in advice.tables]
    whole = advise(model, goal="training", log=open_log(log), columns=["seen=ads/item[1]"])
    assert {table.counted_by for table in whole.tables} == {"log"} and whole.loss is not None
    assert (whole.unused_columns, whole.notes) == ([], [])


def test_a_budget_says_that_it_does_not_go_by_the_log(model: Checkpoint, log: str) -> None:
    advice = advise(model, goal="training", log=open_log(log), columns=["seen=ads/item[1]"], budget=60_000)
    assert advice.over_budget and advice.compared_by == "freq"
    assert advice.notes == [
        "the budget compares rows by freq in the checkpoint, as the command does, and not by the log, which counts what"
        " is lost"
    ]
    for table in advice.tables:
        assert table.lookups and table.lookups_missed is not None
        assert table.notes[-1].endswith(f"and {table.lookups_missed / table.lookups:.2%} of the log's")


def read_policy_of(text: str, folder: Path) -> Any:
    (folder / "read.toml").write_text(text)
    return read_policy(str(folder / "read.toml"))


def test_auc_before_and_after(model: Checkpoint, log: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pyarrow import parquet

    (tmp_path / "ranked.py").write_text(
        "def score(rows):\n    return rows['user'][:, :4].sum(1) + rows['seen'][:, 0]\n"
    )
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"columns": ["seen=ads/item[1]"], "labels": "clicked"}
    advice = advise(model, log=open_log(log), scorer=scorer_named("ranked:score"), max_loss=0.3, **options)
    columns = parquet.read_table(log)
    policy = read_policy_of(advice.policy_text(), tmp_path)
    export_saved_model(model, tmp_path / "out", policy=policy, dtype=policy.dtypes([*model.tables]))
    for checkpoint, auc in ((model, advice.auc[0]), (kvtools.open(str(tmp_path / "out")), advice.auc[1])):
        rows = {name: rows_of(checkpoint, name) for name in model.tables}
        scores = []
        for user, item in zip(columns["user"].to_pylist(), columns["seen"].to_pylist(), strict=True):
            of_user = rows["user"].get(user, np.zeros(16, np.float32))
            of_item = rows["ads/item[1]"].get(item, np.zeros(32, np.float32))
            scores.append(of_user[:4].sum() + of_item[0])
        labels = columns["clicked"].to_numpy(zero_copy_only=False)
        pairs = np.array(scores)[labels][:, None] - np.array(scores)[~labels][None, :]
        assert math.isclose(auc, ((pairs > 0).mean() + (pairs == 0).mean() / 2), rel_tol=1e-3)
    assert advice.auc[0] != advice.auc[1]
    with pytest.raises(UsageError, match=r"all as wide; the log has 'user' of 16 numbers"):
        advise(model, log=open_log(log), scorer=dot_products, labels="clicked")
    with pytest.raises(BadInputError, match="the scorer failed: KeyError"):
        advise(model, log=open_log(log), scorer=lambda rows: rows["gone"], **options)
    with pytest.raises(BadInputError, match=r"the scorer gave shape \[1\]"):
        advise(model, log=open_log(log), scorer=lambda rows: [1.0], **options)
    with pytest.raises(BadInputError, match="has the label"):
        advise(model, log=open_log(log), scorer=dot_products, columns=["seen=ads/item[1]"], labels="user")


def test_area_under_curve_counts_ties_as_halves() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 6, 60).astype(float), rng.random(60) < 0.4
    pairs = scores[labels][:, None] - scores[~labels][None, :]
    assert math.isclose(area_under_curve(labels, scores), (pairs > 0).mean() + (pairs == 0).mean() / 2)
    with pytest.raises(BadInputError, match="all 2 labels are 1"):
        area_under_curve(np.array([True, True]), np.zeros(2))


def in_memory(*tables: ArrayTable) -> Checkpoint:
    return Checkpoint("model", "memory", {one.schema.name: one for one in tables})


def test_where_nobody_counts_no_row_is_cut() -> None:
    (told,) = advise(in_memory(table("user", 500, 8, freqs=True, versions=True))).tables
    assert told.fields == {"dtype": "int8"} and told.kept == told.rows and told.loss is None
    assert any("no frequencies" in note for note in told.notes)
    assert {measure.lookups for measure in told.measures} == {None}


def test_rows_that_a_type_does_not_hold_are_not_rounded_to_it() -> None:
    values = np.full((4, 8), 1e5, np.float32) * np.arange(8, dtype=np.float32)
    (told,) = advise(in_memory(ArrayTable("t", np.arange(4), values)), max_error=1.0).tables
    assert "float16" not in {measure.line.split("'")[1] for measure in told.measures if measure.error}
    assert told.dtype == "int4"
    values[2, 3] = np.nan
    (told,) = advise(in_memory(ArrayTable("t", np.arange(4), values)), max_error=1.0).tables
    assert told.dtype == "bfloat16" and any("NaN" in note for note in told.notes)
    (told,) = advise(in_memory(ArrayTable("t", np.arange(4), np.ones((4, 2), np.float32)))).tables
    assert told.dtype in ("float16", "bfloat16")  # two numbers, and an offset and a scale, would be larger
    (told,) = advise(in_memory(ArrayTable("t", np.arange(4), np.ones((4, 2), np.int32)))).tables
    assert told.dtype is None
    (told,) = advise(in_memory(ArrayTable("t", np.empty(0, np.int64), np.empty((0, 4), np.float32)))).tables
    assert told.rows == 0


def test_admission_is_the_smallest_count_that_keeps_as_many_keys_out() -> None:
    once = ArrayTable("t", np.arange(5), np.ones((5, 4), np.float32), freqs=np.ones(5, np.int64))
    (told,) = advise(in_memory(once)).tables
    assert told.fields["admission"] == {"count": 2}  # 1,000 would make new keys wait longer, and saves no more


def test_ages_of_steps_and_of_a_moment() -> None:
    steps = ArrayTable(
        "t",
        np.arange(2000),
        np.ones((2000, 4), np.float32),
        freqs=np.where(np.arange(2000) < 1500, 1, 1000),
        versions=np.arange(2000) * 5 + 1,
        version_unit="steps",
    )
    (told,) = advise(in_memory(steps), goal="training").tables
    assert told.fields == {"min-freq": 2, "admission": {"count": 2}} and told.kept == 500
    (told,) = advise(in_memory(steps), goal="training", now=10_100).tables
    ages = [measure for measure in told.measures if measure.line.startswith("older-than")]
    assert {measure.line: measure.rows for measure in ages}["older-than = 5000"] == int(
        (np.arange(2000) * 5 + 1 < 5100).sum()
    )


def test_a_policy_names_tables_and_nothing_else(tmp_path: Path) -> None:
    names = ["a*", "b[0]", "c?", 'q"uote', "new\nline", "back\\slash", "\x7f", "ü", "plain/name"]
    entries = [Entry(name, {"min-freq": number + 1}, {"min-freq": "x\ny"}) for number, name in enumerate(names)]
    policy = read_policy_of(policy_text(entries, budget=100, by="freq", head=["a\nb"]), tmp_path)
    assert (policy.budget, policy.by) == (100, "freq")
    for number, name in enumerate(names):
        assert [rule.criteria.min_freq for rule in policy.rules if rule.matches(name)] == [number + 1]
        assert pattern_of(name) in policy.rules[number].patterns


def test_bad_questions_are_told(model: Checkpoint, log: str) -> None:
    for options, message in (
        ({"max_loss": 1.5}, "got a largest loss of 1.5"),
        ({"max_error": -1}, "got a largest error of -1"),
        ({"labels": "clicked"}, "labels and a scorer go together"),
        ({"labels": "clicked", "scorer": dot_products}, "labels are a column of a log"),
        ({"log": open_log(log), "tables": ["ads/item[1]"]}, "none of its columns"),
        ({"log": open_log(log), "columns": ["seen=item"]}, "there is no table 'item', but 'ads/item[1]', 'user'"),
        ({"log": open_log(log), "columns": ["sen=user"]}, "did you mean 'seen'?"),
        ({"log": open_log(log), "columns": ["clicked=user"]}, "column 'clicked' holds bool"),
    ):
        with pytest.raises(UsageError) as caught:
            advise(model, **options)
        assert message in str(caught.value), options
    for name in ("dots", "no_such_module:f", "kvtools:nothing", "kvtools:__version__"):
        with pytest.raises(UsageError, match="scoring"):
            scorer_named(name)


def test_rows_of_zeros_lose_nothing_where_missing_keys_give_zeros(tmp_path: Path) -> None:
    values = np.ones((10, 8), np.float32)
    values[3] = 0
    freqs = np.full(10, 100)
    freqs[7:] = 1
    write_tables([ArrayTable("t", np.arange(10), values, freqs=freqs)], str(tmp_path / "m"), "tfplugin")
    model = kvtools.open(str(tmp_path / "m"))
    (told,) = advise(model, max_loss=0.005).tables
    assert told.fields["min-freq"] == 2 and told.kept == 6
    assert (told.lookups, told.lookups_missed, told.loss) == (703, 103, 3 / 703)
    (told,) = advise(model, goal="training", max_loss=0.005).tables
    assert (told.kept, told.lookups_missed, told.loss) == (7, 3, 3 / 703)
