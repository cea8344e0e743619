"""tfplugin.CheckpointManager: chains of full checkpoints and increments, written, kept, restored and refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from chain_reference import folded, tables_in
from chain_runs import Trained, random_run

import kvtools
import tfplugin
from kvtools.chain import (
    RECORD_TENSOR,
    ChainError,
    Member,
    MembersOfFolder,
    Record,
    fingerprint,
    members,
    newest_chain,
)
from kvtools.errors import CorruptFileError
from tfplugin.chain.kept import Kept
from tfplugin.ops import raw
from tfplugin.policies import ExpireAfterSeconds, ExpireAfterSteps

v1 = tf.compat.v1


def manager_of(trained: Trained, folder: Path, **options: object) -> tfplugin.CheckpointManager:
    return tfplugin.CheckpointManager(trained.checkpoint, folder, **{"delta_every": 0.0, **options})


def names(folder: Path) -> list[str]:
    return [member.prefix.name for member in members(folder)]


def record(prefix: str | Path) -> Record:
    return Record.from_json(tf.train.load_checkpoint(str(prefix)).get_tensor(RECORD_TENSOR), prefix)


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Path:
    """ckpt-2 and three increments after it, and ckpt-1, which has no slots."""
    folder = tmp_path_factory.mktemp("made") / "chain"
    trained, random = Trained(2), np.random.default_rng(0)
    manager = manager_of(trained, folder)
    manager.save(step=100)
    for n in range(4):
        trained.step(random)
        trained.user.remove(trained.user.export()[0][:2])
        manager.save(step=101 + n)
    return folder


@pytest.fixture
def copied(chain, tmp_path) -> Path:
    return Path(shutil.copytree(chain, tmp_path / "chain"))


# ---- What is written and restored ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_full_and_its_increments_are_the_full_checkpoint_of_the_last_moment(seed, tmp_path):
    random_run(seed, tmp_path)


@pytest.mark.thorough
def test_random_runs_with_evictions_resharding_and_kills(tmp_path):
    for seed in range(3, 43):
        random_run(seed, tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))


def test_members_say_what_they_are_and_what_they_follow(chain):
    assert names(chain) == ["ckpt-1", "ckpt-2", "ckpt-3.delta", "ckpt-4.delta", "ckpt-5.delta"]
    first, full, *increments = [record(chain / name) for name in names(chain)]
    assert first.previous is None and full.previous.sequence == 1
    assert full.previous.fingerprint == fingerprint(chain / "ckpt-1")
    for n, (said, before) in enumerate(zip(increments, names(chain)[1:], strict=False), 3):
        assert (said.chain, said.sequence, said.kind, said.full) == (first.chain, n, "delta", 2)
        assert (said.previous.sequence, said.previous.fingerprint) == (n - 1, fingerprint(chain / before))
        assert said.step == 99 + n
        for x, counts in said.tables.items():
            reader = tf.train.load_checkpoint(str(chain / f"ckpt-{n}.delta"))
            assert (
                len(reader.get_tensor(f"{x}-keys")) == counts.rows
                and len(reader.get_tensor(f"{x}-removed")) == counts.removed
            )
            assert json.loads(reader.get_tensor(f"{x}-kvmeta"))["delta"] is True
    assert tf.train.latest_checkpoint(str(chain)) == str(chain / "ckpt-2")


def test_an_increment_has_the_rows_that_changed_alone(tmp_path):
    trained = Trained(1)
    trained.user.upsert(tf.range(1000, dtype=tf.int64), tf.ones([1000, 4]))
    manager = manager_of(trained, tmp_path)
    manager.save()
    trained.user.upsert([5, 2000], tf.zeros([2, 4]))
    trained.user.remove([7, 8, 4000])
    rows, removed = tables_in(manager.save())["user/.ATTRIBUTES/kv"]
    assert set(rows) == {5, 2000} and removed - {4000} == {7, 8}
    counts = record(manager.latest_checkpoint).tables["user/.ATTRIBUTES/kv"]
    assert (counts.rows, counts.born) == (2, 1)
    manager.save()
    assert record(manager.latest_checkpoint).tables["user/.ATTRIBUTES/kv"].rows == 0


def test_a_row_that_changes_while_it_is_written_is_written_as_it_was(tmp_path, monkeypatch):
    trained, random = Trained(1), np.random.default_rng(1)
    trained.step(random)
    manager = manager_of(trained, tmp_path, full_every=0.0)
    manager.save()
    trained.step(random)
    go = threading.Event()
    write = tfplugin.CheckpointManager._write
    monkeypatch.setattr(tfplugin.CheckpointManager, "_write", lambda *args: go.wait(60) and write(*args))
    manager.save(options=tf.train.CheckpointOptions(enable_async=True))  # an increment, and a full of that moment
    reference = trained.checkpoint.write(str(tmp_path / "reference"))
    for _ in range(3):
        trained.step(random)
    trained.user.remove(trained.user.export()[0][:5])
    go.set()
    manager.sync()
    wanted = {table: rows for table, (rows, _) in tables_in(reference).items()}
    assert folded([str(tmp_path / "ckpt-1"), str(tmp_path / "ckpt-2.delta")]) == wanted
    assert folded([str(tmp_path / "ckpt-2")]) == wanted
    for name in ("ckpt-2", "ckpt-2.delta"):
        dense = "dense/.ATTRIBUTES/VARIABLE_VALUE"
        np.testing.assert_array_equal(*(tf.train.load_variable(str(tmp_path / p), dense) for p in (name, "reference")))


def test_increments_go_on_while_a_full_is_being_written(tmp_path, monkeypatch):
    trained, random = Trained(1), np.random.default_rng(1)
    trained.step(random)
    manager = manager_of(trained, tmp_path)
    manager.save()
    go = threading.Event()
    write = tfplugin.CheckpointManager._write
    monkeypatch.setattr(
        tfplugin.CheckpointManager,
        "_write",
        lambda self, session, moment, *args: (
            (not moment.is_full or go.wait(60)) and write(self, session, moment, *args)
        ),
    )
    manager._last_full = -float("inf")
    manager.save_if_due()
    manager._settle(wait=True)
    for _ in range(2):
        trained.step(random)
        manager.save()
    assert names(tmp_path) == ["ckpt-1", "ckpt-2.delta", "ckpt-3.delta", "ckpt-4.delta"]
    go.set()
    manager.sync()
    assert names(tmp_path) == ["ckpt-1", "ckpt-2.delta", "ckpt-2", "ckpt-3.delta", "ckpt-4.delta"]
    assert [member.prefix.name for member in newest_chain(tmp_path)] == ["ckpt-2", "ckpt-3.delta", "ckpt-4.delta"]
    assert folded([str(tmp_path / "ckpt-1"), *(str(tmp_path / f"ckpt-{n}.delta") for n in (2, 3, 4))]) == folded(
        [str(member.prefix) for member in newest_chain(tmp_path)]
    )
    again = Trained(3)
    assert manager_of(again, tmp_path).restore_or_initialize() == str(tmp_path / "ckpt-4.delta")
    assert int(again.user.size()) == int(trained.user.size())


@pytest.mark.parametrize("how", ["clear", "restore", "slots", "removed"])
def test_a_full_is_written_by_itself_where_the_changes_are_not_known(how, tmp_path, caplog):
    trained, random = Trained(1), np.random.default_rng(1)
    trained.step(random)
    manager = manager_of(trained, tmp_path / "chain", max_removed=4)
    manager.save()
    if how == "clear":
        trained.user.clear()
    elif how == "restore":
        trained.checkpoint.restore(str(tmp_path / "chain/ckpt-1"))
    elif how == "slots":
        other = tfplugin.OptimizerWrapper(tf.keras.optimizers.Ftrl(0.1))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(trained.user, [1]))
        other.apply_gradients([(tape.gradient(loss, trained.user), trained.user)])
    else:
        trained.user.remove(trained.user.export()[0])
    path = manager.save()
    assert path == str(tmp_path / "chain/ckpt-2") and record(path).previous.sequence == 1
    assert re.search(r"is written whole: '(user|item):0'", caplog.text)
    trained.user.upsert([1], tf.ones([1, 4]))
    assert manager.save() == str(tmp_path / "chain/ckpt-3.delta")
    newest_chain(tmp_path / "chain")


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        ({}, {"max_capacity": 2}, r"'ad:0': the restore left out 2 rows"),
        ({}, {"expiry": ExpireAfterSteps(1)}, r"'ad:0': its versions are steps now"),
        ({}, {"padding_key": 1}, r"'ad:0': its padding_key is 1 now"),
        ({"expiry": ExpireAfterSteps(9)}, {"expiry": ExpireAfterSteps(1)}, r"'ad:0': the restore left out 3 rows"),
        ({}, None, r"there is no table any longer of which the chain has 'ad/"),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_rows_that_a_restore_leaves_out_are_not_left_in_the_chain(before, now, why, parts, tmp_path, caplog):
    def made(options):
        kept = tf.get_kv_variable("kept", 2)
        tables = {"kept": kept}
        if options is not None:
            tables["ad"] = tf.get_kv_variable("ad", 2, **options)
        return tables, tfplugin.CheckpointManager(tf.train.Checkpoint(**tables), tmp_path / "chain", delta_every=0.0)

    tables, manager = made(before | ({"partitioner": v1.fixed_size_partitioner(parts)} if parts > 1 else {}))
    optimizer = tfplugin.optimizers.SGD(0.1)
    for key in (1, 2, 3, 4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(tables["ad"], [key]))
        ads = list(tables["ad"]) if parts > 1 else [tables["ad"]]
        optimizer.apply_gradients(zip(tape.gradient(loss, ads), ads, strict=True))
        for part in ads if isinstance(before.get("expiry"), ExpireAfterSteps) else ():
            part.set_step(key)
        manager.save()
    manager.close()

    tables, manager = made(now)
    manager.restore_or_initialize()
    tables["kept"].upsert([7], tf.ones([1, 2]))
    full = manager.save()
    assert full == str(tmp_path / "chain/ckpt-5") and re.search(why, caplog.text)
    assert record(full).previous.sequence == 4 and record(full).chain == record(tmp_path / "chain/ckpt-1").chain
    tables["kept"].upsert([8], tf.ones([1, 2]))
    assert manager.save() == str(tmp_path / "chain/ckpt-6.delta")
    chain = kvtools.open(tmp_path / "chain")
    assert set(chain.tables) == set(tables)
    for name, table in tables.items():
        assert sorted(chain.table(name).to_numpy().keys.tolist()) == sorted(table.export()[0].numpy().tolist())


def test_rows_that_expire_while_nothing_runs_go_from_the_chain(tmp_path):
    life = 3600

    def made():
        table = tf.get_kv_variable("ad", 2, expiry=ExpireAfterSeconds(life))
        checkpoint = tf.train.Checkpoint(ad=table)
        return table, tfplugin.CheckpointManager(checkpoint, tmp_path / "chain", delta_every=0.0)

    def keys():
        return sorted(kvtools.open(tmp_path / "chain").table("ad").to_numpy().keys.tolist())

    def save_what_goes_in_two_seconds(key):
        while True:  # until it was still there, however long a save takes
            stamp = tf.constant([int(time.time()) - life + 2], tf.uint32)
            raw.kv_table_import(table.handle, tf.constant([key], tf.int64), tf.ones([1, 2]), [1], stamp)
            path = manager.save()
            if key in keys():
                return path

    table, manager = made()
    save_what_goes_in_two_seconds(1)
    time.sleep(2.1)  # it goes here, and the chain has it
    table.upsert([3], tf.ones([1, 2]))
    assert manager.save().endswith(".delta") and keys() == [3]
    manager.close()

    table, manager = made()
    manager.restore_or_initialize()
    assert save_what_goes_in_two_seconds(4).endswith(".delta") and keys() == [3, 4]
    manager.close()

    time.sleep(2.1)
    table, manager = made()
    manager.restore_or_initialize()
    table.upsert([5], tf.ones([1, 2]))
    assert not manager.save().endswith(".delta") and keys() == [3, 5]


def test_rows_that_expired_and_came_again_in_the_chain_are_not_left_out(tmp_path):
    def made():
        table = tf.get_kv_variable("ad", 2, expiry=ExpireAfterSteps(2))
        manager = tfplugin.CheckpointManager(tf.train.Checkpoint(ad=table), tmp_path / "chain", delta_every=0.0)
        return table, manager

    table, manager = made()
    for step in (1, 5, 9):
        table.set_step(step)
        table.upsert([1, 2], tf.ones([2, 2]))
        manager.save()
    manager.close()
    table, manager = made()
    manager.restore_or_initialize()
    table.upsert([3], tf.ones([1, 2]))
    assert manager.save() == str(tmp_path / "chain/ckpt-4.delta")
    assert len(kvtools.open(tmp_path / "chain").table("ad")) == int(table.size()) == 3


def test_a_table_that_a_restore_leaves_without_its_rows_is_named(tmp_path, caplog):
    def manager(**tables):
        checkpoint = tf.train.Checkpoint(
            tables={name: tf.get_kv_variable(name, 4, **how) for name, how in tables.items()}
        )
        return tfplugin.CheckpointManager(checkpoint, tmp_path / "chain"), checkpoint

    writer, checkpoint = manager(ad={}, item={})
    checkpoint.tables["ad"].upsert([1], tf.ones([1, 4]))
    writer.save()
    writer.close()
    manager(ad={"partitioner": tf.compat.v1.fixed_size_partitioner(2)}, item={}, more={})[0].restore_or_initialize()
    manager(ad={})[0].restore_or_initialize()  # item may be made later
    assert not caplog.text
    manager(adverts={}, item={})[0].restore_or_initialize()
    assert "no rows at the places of 'adverts', and nothing takes those of 'tables/ad'" in caplog.text


def test_a_full_is_written_where_more_rows_expire_at_a_save_than_a_table_remembers(tmp_path, caplog):
    aging = tf.get_kv_variable("aging", 2, expiry=ExpireAfterSteps(1))
    kept = tf.get_kv_variable("kept", 2)
    checkpoint = tf.train.Checkpoint(aging=aging, kept=kept)
    manager = tfplugin.CheckpointManager(checkpoint, tmp_path / "chain", delta_every=0.0, max_removed=4)
    aging.upsert(list(range(9)), tf.ones([9, 2]))
    kept.upsert([1], tf.ones([1, 2]))
    manager.save()
    aging.set_step(7)
    kept.upsert([2], tf.ones([1, 2]))
    assert manager.save() == str(tmp_path / "chain/ckpt-2") and "more than 4 rows were removed" in caplog.text
    chain = kvtools.open(tmp_path / "chain")
    assert {name: len(chain[name]) for name in chain} == {"aging": 0, "kept": 2}
    kept.upsert([3], tf.ones([1, 2]))
    assert manager.save() == str(tmp_path / "chain/ckpt-3.delta")


def test_a_full_is_written_of_a_session_where_more_rows_expire_than_a_table_remembers(tmp_path):
    with tf.Graph().as_default(), v1.Session() as session:
        tables = [tf.get_kv_variable("aging", 2, expiry=ExpireAfterSteps(1)), tf.get_kv_variable("kept", 2)]
        fill = [table.upsert(tf.range(9, dtype=tf.int64), tf.ones([9, 2])) for table in tables]
        age = tables[0].set_step(7)
        manager = tfplugin.CheckpointManager(v1.train.Saver(), tmp_path / "chain", delta_every=0.0, max_removed=4)
        session.run(v1.global_variables_initializer())
        session.run(fill)
        manager.save(session=session)
        session.run(age)
        assert manager.save(session=session) == str(tmp_path / "chain/ckpt-2")
    chain = kvtools.open(tmp_path / "chain")
    assert {name: len(chain[name]) for name in chain} == {"aging": 0, "kept": 9}


def test_rows_that_a_session_leaves_out_are_not_left_in_the_chain(tmp_path):
    for life, options in enumerate(({}, {"max_capacity": 2})):
        with tf.Graph().as_default(), v1.Session() as session:
            table = tf.get_kv_variable("ad", 2, **options)
            insert = table.upsert([1 + life, 5 + life, 9 + life], tf.ones([3, 2])) if not life else table.size()
            manager = tfplugin.CheckpointManager(v1.train.Saver(), tmp_path / "chain", delta_every=0.0)
            session.run(v1.global_variables_initializer())
            manager.restore_or_initialize(session)
            session.run(insert)
            path = manager.save(session=session)
            assert len(kvtools.open(tmp_path / "chain").table("ad")) == int(session.run(table.size()))
            manager.close()
    assert path == str(tmp_path / "chain/ckpt-2")


def test_any_member_restores_by_its_checkpoint_where_there_is_a_manager(copied):
    trained = Trained(3)
    manager = manager_of(trained, copied)
    assert manager.checkpoints == [str(copied / name) for name in names(copied)]
    trained.checkpoint.restore(str(copied / "ckpt-4.delta")).expect_partial()
    held = folded([str(copied / name) for name in ("ckpt-2", "ckpt-3.delta", "ckpt-4.delta")])
    assert set(trained.user.export()[0].numpy().tolist()) == set(held["user/.ATTRIBUTES/kv"])


def test_a_plain_restore_refuses_an_increment_and_says_who_takes_it(copied, tmp_path):
    elsewhere = shutil.copytree(copied, tmp_path / "elsewhere")
    trained = Trained(2)
    before = trained.user.export()[0].numpy()
    with pytest.raises(tf.errors.OpError, match=r"tfplugin\.CheckpointManager.*kvtools merge"):
        trained.checkpoint.restore(str(elsewhere / "ckpt-5.delta"))
    np.testing.assert_array_equal(trained.user.export()[0], before)


def test_checkpoints_of_tensorflows_manager_are_restored_and_gone_on_from(tmp_path):
    trained, random = Trained(1), np.random.default_rng(1)
    trained.step(random)
    old = tf.train.CheckpointManager(trained.checkpoint, tmp_path, max_to_keep=2)
    old.save()
    old.save()
    again = Trained(2)
    manager = manager_of(again, tmp_path, max_to_keep=1)
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-2")
    assert int(again.user.size()) == int(trained.user.size())
    again.step(random)
    assert manager.save() == str(tmp_path / "ckpt-3")
    assert names(tmp_path) == ["ckpt-3"]


def test_tables_that_are_made_later_are_restored_when_they_come(copied):
    class Later(tf.Module):
        def make(self):
            self.user = tf.get_kv_variable("user", embedding_dim=4)

    later = Later()
    checkpoint = tf.train.Checkpoint(root=later)
    manager = tfplugin.CheckpointManager(checkpoint, copied, delta_every=0.0)
    manager.restore_or_initialize()
    later.make()
    held = folded([str(copied / name) for name in names(copied)[1:]])
    assert int(later.user.size()) == len(held["user/.ATTRIBUTES/kv"])


def test_what_objects_that_are_made_later_are_restored_from_is_not_removed(copied):
    class Later(tf.Module):
        def make(self):
            self.user = tf.get_kv_variable("user", embedding_dim=4)

    held = folded([str(copied / name) for name in names(copied)[1:]])
    later = Later()
    checkpoint = tf.train.Checkpoint(root=later)
    manager = tfplugin.CheckpointManager(checkpoint, copied, max_to_keep=1, delta_every=None)
    manager.restore_or_initialize()
    manager.save()
    later.make()
    assert int(later.user.size()) == len(held["user/.ATTRIBUTES/kv"])


def test_counts_of_keys_that_wait_for_their_row_are_those_of_the_last_member(tmp_path):
    def made():
        table = tf.get_kv_variable("user", embedding_dim=2, enter_threshold=3)
        return table, tfplugin.CheckpointManager(tf.train.Checkpoint(table=table), tmp_path, delta_every=0.0)

    table, manager = made()
    table.sparse_read([1, 2])
    manager.save()
    table.sparse_read([1, 3])
    assert manager.save().endswith(".delta")
    again, manager = made()
    manager.restore_or_initialize()
    again.sparse_read([1, 2, 3])
    assert again.export()[0].numpy().tolist() == [1]
    again.sparse_read([2])
    assert sorted(again.export()[0].numpy().tolist()) == [1, 2]


# ---- What is kept ----------------------------------------------------------------------------------------------------


def test_an_old_full_goes_with_its_increments_when_a_newer_one_is_whole(tmp_path):
    trained, random = Trained(1), np.random.default_rng(1)
    trained.step(random)
    manager = manager_of(trained, tmp_path, max_to_keep=2)
    for n in range(9):
        manager._last_full = -float("inf") if n % 3 == 0 else manager._last_full
        trained.step(random)
        manager.save()
    manager.sync()
    assert names(tmp_path) == [
        "ckpt-4",
        "ckpt-5.delta",
        "ckpt-6.delta",
        "ckpt-7.delta",
        "ckpt-7",
        "ckpt-8.delta",
        "ckpt-9.delta",
    ]
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert [Path(path).name for path in state.all_model_checkpoint_paths] == ["ckpt-4", "ckpt-7"]
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-9.delta")


def test_increments_go_by_one_listing_of_the_folder(tmp_path, monkeypatch):
    """By one each, those of an hour took twenty seconds."""

    def put(*names):
        for name in names:
            (tmp_path / f"{name}.index").touch()
            (tmp_path / f"{name}.data-00000-of-00001").touch()

    kept = Kept(tmp_path, "ckpt", 1, None)
    put("ckpt-1")
    kept.add(Member(1, "full", tmp_path / "ckpt-1"))
    put(*(f"ckpt-{number}.delta" for number in range(2, 42)), "ckpt-3.delta-of-mine", "ckpt-40")
    listings = []
    original = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: listings.append(path) or original(path))
    kept.add(Member(40, "full", tmp_path / "ckpt-40"))
    left = {path.name.partition(".data")[0].removesuffix(".index") for path in original(tmp_path)}
    assert left == {"checkpoint", "ckpt-40", "ckpt-41.delta", "ckpt-3.delta-of-mine"}
    assert listings == [tmp_path]


def test_members_of_a_folder_are_those_that_are_there_now(tmp_path):
    there = MembersOfFolder(tmp_path / "chain", "a")
    assert there.now() == []
    (tmp_path / "chain").mkdir()
    for put in ("a-10", "a-9.delta", "b-1", "a-10.delta", ".a-3", "a-x", "a-2.delta"):
        (tmp_path / "chain" / f"{put}.index").touch()
        assert there.now() == members(tmp_path / "chain", "a")
    assert [one.prefix.name for one in there.now()] == ["a-2.delta", "a-9.delta", "a-10.delta", "a-10"]
    (tmp_path / "chain" / "a-9.delta.index").rename(tmp_path / "chain" / "a-11.index")
    assert [one.prefix.name for one in there.now()] == ["a-2.delta", "a-10.delta", "a-10", "a-11"]


def test_fulls_of_every_so_many_hours_stay_as_with_tensorflows_manager(tmp_path, monkeypatch):
    now = [1e9]
    monkeypatch.setattr("time.time", lambda: now[0])
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    options = {"max_to_keep": 1, "keep_checkpoint_every_n_hours": 2}
    ours = tfplugin.CheckpointManager(checkpoint, tmp_path / "ours", delta_every=None, **options)
    theirs = tf.train.CheckpointManager(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path / "theirs", **options)
    for _ in range(7):
        now[0] += 3600.0
        ours.save()
        theirs.save()
    assert names(tmp_path / "ours") == names(tmp_path / "theirs") and len(names(tmp_path / "ours")) > 2


def test_what_killed_writers_left_is_removed(copied):
    (copied / ".ckpt-6.kvtools-abc").mkdir()
    (copied / "ckpt-6.data-00000-of-00001").write_bytes(b"half")
    (copied / "ckpt-5.delta.data-00000-of-00009").touch()
    trained = Trained(1)
    manager = manager_of(trained, copied)
    manager.restore_or_initialize()
    assert (copied / "ckpt-6.data-00000-of-00001").exists()  # who only reads removes nothing
    manager.save()
    assert [path.name for path in copied.glob(".*")] == [".ckpt.writer"]
    assert not list(copied.glob("ckpt-6.data*"))
    assert names(copied)[-1] == "ckpt-6.delta"


def test_the_disk_refuses_and_the_next_increment_has_it_all(tmp_path, monkeypatch):
    trained, random = Trained(1), np.random.default_rng(1)
    trained.step(random)
    manager = manager_of(trained, tmp_path)
    manager.save()
    trained.step(random)

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    manager._last_full = -float("inf")  # so that a full of the same moment is given up, too, and told of once
    with monkeypatch.context() as patch:
        patch.setattr("tfplugin.chain.manager.replace_files", full_disk)
        with pytest.raises(RuntimeError, match="No space left"):
            manager.save()
    trained.user.remove(trained.user.export()[0][:3])
    manager.save()
    assert names(tmp_path) == ["ckpt-1", "ckpt-2.delta", "ckpt-2"]
    reference = trained.checkpoint.write(str(tmp_path / "reference"))
    wanted = {table: rows for table, (rows, _) in tables_in(reference).items()}
    for held in (["ckpt-1", "ckpt-2.delta"], ["ckpt-2"]):
        assert folded([str(tmp_path / name) for name in held]) == wanted


# ---- What is refused -------------------------------------------------------------------------------------------------


def remove(folder: Path, name: str) -> None:
    for path in folder.glob(f"{name}.*"):
        if path.name.startswith((f"{name}.index", f"{name}.data")):
            path.unlink()


def copy(folder: Path, source: str | Path, target: str) -> None:
    source = folder / source
    for path in source.parent.glob(f"{source.name}.*"):
        if path.name.startswith((f"{source.name}.index", f"{source.name}.data")):
            shutil.copy(path, folder / path.name.replace(source.name, target, 1))


def other_run(folder: Path) -> Path:
    manager = manager_of(Trained(2), folder / "other")
    for _ in range(5):
        manager.save()
    return folder / "other"


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


FAULTS = {
    "gap": (lambda folder: remove(folder, "ckpt-4.delta"), ChainError, "gap: increment 4 is missing"),
    "first of the increments": (
        lambda folder: remove(folder, "ckpt-3.delta"),
        ChainError,
        "gap: increment 3 is missing",
    ),
    "duplicate": (lambda folder: copy(folder, "ckpt-5.delta", "ckpt-6.delta"), ChainError, "renamed or copied"),
    "twice": (lambda folder: copy(folder, "ckpt-4.delta", "other-4.delta"), None, ""),
    "disorder": (
        lambda folder: (
            copy(folder, "ckpt-4.delta", "ckpt-9.delta"),
            copy(folder, "ckpt-5.delta", "ckpt-4.delta"),
            copy(folder, "ckpt-9.delta", "ckpt-5.delta"),
            remove(folder, "ckpt-9.delta"),
        ),
        ChainError,
        "renamed or copied",
    ),
    "full of an increment": (lambda folder: copy(folder, "ckpt-2", "ckpt-5"), ChainError, "renamed or copied"),
    "another run's": (
        lambda folder: copy(folder, other_run(folder) / "ckpt-5.delta", "ckpt-5.delta"),
        ChainError,
        "of another chain",
    ),
    "no full": (
        lambda folder: (remove(folder, "ckpt-1"), remove(folder, "ckpt-2")),
        ChainError,
        "no full",
    ),
    "index cut short": (
        lambda folder: os.truncate(folder / "ckpt-4.delta.index", 40),
        CorruptFileError,
        "ckpt-4.delta",
    ),
    "data cut short": (
        lambda folder: os.truncate(next(folder.glob("ckpt-4.delta.data*")), 40),
        CorruptFileError,
        "ckpt-4.delta",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_nothing_is_restored(fault, copied):
    break_it, error, message = FAULTS[fault]
    break_it(copied)
    trained = Trained(2)
    trained.user.upsert([-7], tf.ones([1, 4]))
    manager = manager_of(trained, copied)
    if error is None:
        manager.restore_or_initialize()
        return
    with pytest.raises(error, match=message):
        manager.restore_or_initialize()
    assert trained.user.export()[0].numpy().tolist() == [-7]
    np.testing.assert_array_equal(trained.dense, np.ones([4, 3]))


@pytest.mark.parametrize("name", ["ckpt-2", "ckpt-3.delta", "ckpt-5.delta"])
def test_a_flipped_bit_is_found_before_anything_is_restored(name, copied):
    trained = Trained(2)
    manager = manager_of(trained, copied)
    for path in [copied / f"{name}.index", *copied.glob(f"{name}.data*")]:
        kept = path.read_bytes()
        for at in (0.0, 0.3, 0.7, 0.9):
            flip(path, at)
            if path.read_bytes() == kept:
                continue
            with pytest.raises((CorruptFileError, ChainError)):
                manager.restore_or_initialize()
            path.write_bytes(kept)
    assert int(trained.user.size()) == 0
    assert manager.restore_or_initialize()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_to_keep": 0}, "max_to_keep must be 1 or more"),
        ({"full_every": -1.0}, "full_every must be 0 or more"),
        ({"delta_every": float("nan")}, "delta_every must be 0 or more"),
        ({"full_every": 1.0, "delta_every": 2.0}, "contradict each other"),
        ({"max_removed": -1}, "max_removed"),
        ({"checkpoint_interval": 5}, "step_counter"),
        ({"full_every": "x"}, "full_every must be 0 or more seconds, or None, got 'x'"),
        ({"max_to_keep": 1.5}, "max_to_keep must be 1 or more fulls"),
        ({"max_removed": "many"}, "max_removed must be 0 or more keys"),
        ({"checkpoint_name": "a/b"}, "checkpoint_name .* got 'a/b'"),
        ({"checkpoint_name": ""}, "checkpoint_name"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tfplugin.CheckpointManager(tf.train.Checkpoint(), tmp_path, **options)


def test_an_init_fn_that_is_no_function_is_refused_before_it_is_needed(tmp_path):
    with pytest.raises(TypeError, match="init_fn must be a function without arguments, or None, got 3"):
        tfplugin.CheckpointManager(tf.train.Checkpoint(), tmp_path, init_fn=3)


def test_fulls_more_often_than_increments_come_by_default_take_increments_along(tmp_path):
    manager = tfplugin.CheckpointManager(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path, full_every=0)
    manager.save()
    assert manager.is_due()
    manager.save()
    manager.sync()
    assert names(tmp_path) == ["ckpt-1", "ckpt-2.delta", "ckpt-2"]


def test_what_cannot_be_in_a_chain_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"tf\.train\.Checkpoint or a tf\.compat\.v1\.train\.Saver, got .*Variable"):
        tfplugin.CheckpointManager(tf.Variable(1.0), tmp_path)
    with pytest.raises(ValueError, match="gs://"):
        tfplugin.CheckpointManager(tf.train.Checkpoint(), "gs://bucket/run")
    with pytest.raises(ValueError, match="leave checkpoint_number out"):
        tfplugin.CheckpointManager(tf.train.Checkpoint(), tmp_path).save(checkpoint_number=7)
    table = tf.get_kv_variable("spread", embedding_dim=2)
    table.ranks = 2
    with pytest.raises(ValueError, match=r"'spread:0' is spread over 2 ranks.*sok\.CheckpointManager"):
        tfplugin.CheckpointManager(tf.train.Checkpoint(table=table), tmp_path).save()


def test_in_a_graph_a_checkpoint_is_an_error_that_names_the_saver(tmp_path):
    with tf.Graph().as_default():
        manager = tfplugin.CheckpointManager(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path)
        with pytest.raises(ValueError, match=r"In a graph, give it a tf\.compat\.v1\.train\.Saver"):
            manager.save()


@pytest.mark.parametrize("method", ["restore", "read"])
def test_a_checkpoint_of_tensorflow_that_restores_the_folder_is_told_what_does(copied, method):
    checkpoint = Trained(2).checkpoint
    with pytest.raises(ValueError, match=r"the folder of a chain.*CheckpointManager.*restore_or_initialize\(\)"):
        getattr(checkpoint, method)(str(copied))
    with pytest.raises(tf.errors.NotFoundError):
        getattr(checkpoint, method)(str(copied.parent / "nothing"))


def test_rows_that_expire_go_the_same_way_in_increments_and_fulls(tmp_path):
    """By age, at each step others; a policy that runs on each save; and a capacity: bit for bit at each moment."""
    aging = tf.get_kv_variable("aging", 3, expiry=tfplugin.policies.ExpireAfterSteps(3))
    top = tf.get_kv_variable("top", 3, expiry=tfplugin.policies.KeepTop(25), expire_on_save=True, max_capacity=60)
    optimizer = tfplugin.optimizers.Adam(0.1)
    checkpoint = tf.train.Checkpoint(aging=aging, top=top)
    manager = tfplugin.CheckpointManager(checkpoint, tmp_path / "run", delta_every=0.0, full_every=1e6)
    random = np.random.default_rng(5)
    fold, removed_by = {}, set()
    for round_ in range(9):
        for table in (aging, top):
            keys = random.integers(0, 90, 30)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        path = manager.save()
        if round_ > 1:
            assert path.endswith(".delta")
        members_ = tables_in(path)
        removed_by |= {table for table, (_, removed) in members_.items() if removed}
        fold = folded([path]) if not path.endswith(".delta") else _put_in(fold, members_)
        whole = folded([checkpoint.write(str(tmp_path / f"whole-{round_}"))])
        assert fold == whole, round_
        assert len(fold["top/.ATTRIBUTES/kv"]) <= 25
    assert removed_by == {"aging/.ATTRIBUTES/kv", "top/.ATTRIBUTES/kv"}


def _put_in(fold, members_):
    for table, (rows, removed) in members_.items():
        fold[table] = {key: row for key, row in fold[table].items() if key not in removed} | rows
    return fold


def test_the_interval_in_steps_is_kept_as_tensorflow_keeps_it(tmp_path):
    step = tf.Variable(0, dtype=tf.int64)
    manager = tfplugin.CheckpointManager(
        tf.train.Checkpoint(step=step), tmp_path, delta_every=0.0, step_counter=step, checkpoint_interval=3
    )
    saved = []
    for _ in range(7):
        step.assign_add(1)
        saved.append(manager.save() is not None)
    assert saved == [True, False, False, True, False, False, True]
    assert manager.save(check_interval=False) is None
    assert record(manager.latest_checkpoint).step == 7


def test_nothing_to_restore_calls_init_fn(tmp_path):
    called = []
    manager = tfplugin.CheckpointManager(
        tf.train.Checkpoint(), tmp_path, init_fn=lambda: called.append(1), checkpoint_interval=None
    )
    assert manager.restore_or_initialize() is None and called == [1]
    assert manager.latest_checkpoint is None and manager.checkpoints == [] and manager.directory == str(tmp_path)
