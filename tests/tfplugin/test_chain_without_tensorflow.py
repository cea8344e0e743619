"""kvtools on chains that training wrote: folded without TensorFlow, they are what training saves whole, to the bit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from chain_reference import dense_in, tables_in
from chain_runs import Trained

import tfplugin
from kvtools.chain import newest_chain
from kvtools.chain_check import verify_chain
from kvtools.chain_fold import apply_increments, merge_chain, open_chain
from kvtools.chain_increment import write_increment
from kvtools.chain_log import life_of, log_chain
from kvtools.dialects.detect import open_checkpoint
from kvtools.diff import compare_checkpoints
from kvtools.verify import verify


@pytest.fixture(scope="module", params=[1, 3])
def saved(request, tmp_path_factory) -> tuple[Path, list[str]]:
    """A chain in folder `chain`, and beside it the full checkpoints of the same moments."""
    folder = tmp_path_factory.mktemp("trained")
    trained, random = Trained(request.param), np.random.default_rng(request.param)
    trained.step(random)  # with slots from the first full on
    manager = tfplugin.CheckpointManager(trained.checkpoint, folder / "chain", delta_every=0.0, full_every=3600.0)
    wholes = []
    for n in range(4):
        manager.save(step=n)
        wholes.append(trained.checkpoint.write(str(folder / f"whole-{n}")))
        trained.step(random)
        trained.user.remove(trained.user.export()[0][:3])
        trained.user.upsert(np.arange(5) + 2000 + n, np.ones([5, 4], np.float32))
    return folder, wholes


def test_a_merged_chain_is_the_checkpoint_that_training_would_have_written(saved, tmp_path):
    folder, wholes = saved
    account, merged = merge_chain(folder / "chain", tmp_path / "merged")
    assert account.lossless and len(merged) == 2
    out, whole = str(tmp_path / "merged"), wholes[-1]
    assert tables_in(out) == tables_in(whole)
    assert dense_in(out) == dense_in(whole)
    ours, theirs = tf.train.load_checkpoint(out), tf.train.load_checkpoint(whole)
    for name in theirs.get_variable_to_shape_map():
        if name.endswith("-kvmeta"):
            assert json.loads(ours.get_tensor(name)) == json.loads(theirs.get_tensor(name))
    extra = ours.get_variable_to_shape_map().keys() ^ theirs.get_variable_to_shape_map().keys()
    assert all(name.startswith(("_KVTOOLS", "save_counter")) for name in extra)
    assert not [finding for finding in verify(out).findings if finding.severity == "error"]


def test_training_goes_on_from_a_merged_chain(saved, tmp_path):
    folder, wholes = saved
    merge_chain(folder / "chain", tmp_path / "merged")
    other = Trained(2)
    other.step(np.random.default_rng(9))
    other.checkpoint.restore(str(tmp_path / "merged"))
    again = other.checkpoint.write(str(tmp_path / "again"))
    assert {t: rows for t, (rows, _) in tables_in(again).items()} == {
        t: r for t, (r, _) in tables_in(wholes[-1]).items()
    }
    other.step(np.random.default_rng(10))


def test_each_moment_and_each_way_there(saved, tmp_path):
    folder, wholes = saved
    chain = newest_chain(folder / "chain")
    for n, whole in enumerate(wholes):
        until = chain[0].number + n
        assert compare_checkpoints(
            open_chain(folder / "chain", until=until), open_checkpoint(whole), tables=["user"]
        ).same
    base, *increments = [member.prefix for member in chain]
    apply_increments(base, increments[:1], tmp_path / "one")
    apply_increments(tmp_path / "one", increments[1:], tmp_path / "all")
    assert tables_in(str(tmp_path / "all")) == tables_in(wholes[-1])
    write_increment(wholes[0], wholes[-1], tmp_path / "step.delta")
    apply_increments(wholes[0], [tmp_path / "step.delta"], tmp_path / "stepped")
    assert tables_in(str(tmp_path / "stepped")) == tables_in(wholes[-1])
    assert dense_in(str(tmp_path / "stepped")) == dense_in(wholes[-1])


def test_it_is_sound_and_its_log_is_what_came_and_went(saved):
    folder, wholes = saved
    found = verify_chain(folder / "chain")
    assert [finding for finding in found.findings if finding.severity == "error"] == []
    members = newest_chain(folder / "chain")
    logs = log_chain(members, tables=["user"])
    keys = [set(tables_in(whole)["user/.ATTRIBUTES/kv"][0]) for whole in wholes]
    told = [(len(now - before), len(before - now)) for before, now in itertools.pairwise(keys)]
    assert [(log.tables[0].born, log.tables[0].removed) for log in logs[1:]] == told
    assert [event.what for event in life_of(members, 2000, tables=["user"])][:1] == ["born"]


def check_random_training(seed: int, folder: Path) -> None:
    """After each save, the chain merged without TensorFlow is what a full checkpoint of the moment has."""
    random = np.random.default_rng(seed)
    for life in range(2):
        trained = Trained(int(random.integers(1, 4)))
        manager = tfplugin.CheckpointManager(trained.checkpoint, folder / "chain", delta_every=0.0, full_every=3600.0)
        manager.restore_or_initialize()
        for n in range(random.integers(2, 5)):
            trained.change(random)
            manager.save()
            whole = trained.checkpoint.write(str(folder / f"whole-{life}-{n}"))
            merge_chain(folder / "chain", folder / f"merged-{life}-{n}")
            assert tables_in(str(folder / f"merged-{life}-{n}")) == tables_in(whole)


def test_random_training_with_restarts_into_other_parts(tmp_path):
    check_random_training(1, tmp_path)


@pytest.mark.thorough
def test_random_training_with_restarts_into_other_parts_many_times(tmp_path):
    for seed in range(2, 42):
        check_random_training(seed, tmp_path / str(seed))
