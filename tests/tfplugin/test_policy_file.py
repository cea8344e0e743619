"""A policy file as arguments of variables and layers; and simulations, which agree with variables to the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from kvtools.clip_policy import read_policy
from kvtools.simulate import SimulatedTable
from tfplugin import policies

FILE = """
[[tables]]
name = "user"
min-freq = 2
dtype = "int8"
max-capacity = 1000
eviction = "lfu"
admission = { bloom = 3, capacity = 5000, error = 0.02, below = "zeros" }
padding-key = 0
expire-after = "2h"
expire-below-norm = 1e-3
expire-below-freq = 2
keep-top = 900
keep-top-by = "version"
expire-every = 50
expire-on-save = true

[[tables]]
name = ["ads/*", "item"]
expire-after = 30
admission = { probability = 0.5 }

[[tables]]
name = "word"
top-k = 5
by = "freq"
"""


def test_arguments_are_those_of_variables_and_layers(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(FILE)
    told = tfplugin.policy(path)
    assert told.arguments("user") == {
        "max_capacity": 1000,
        "eviction": "lfu",
        "admission": policies.BloomAdmission(3, 5000, 0.02, "zeros"),
        "padding_key": 0,
        "expiry": [
            policies.ExpireAfterSeconds(7200),
            policies.ExpireBelowNorm(1e-3),
            policies.ExpireBelowFrequency(2),
            policies.KeepTop(900, "version"),
        ],
        "expire_every": 50,
        "expire_on_save": True,
    }
    assert told.arguments("ads/x") == {
        "admission": policies.ProbabilityAdmission(0.5),
        "expiry": [policies.ExpireAfterSteps(30)],
    }
    assert told.arguments("word") == {}
    variable = tfplugin.get_kv_variable("user", 4, **told.arguments("user"))
    assert variable.policies == policies.resolve(
        "user", tf.int64, **{k: v for k, v in told.arguments("user").items() if k != "eviction"}
    )
    layer = tfplugin.keras.Embedding(4, name="user", **told.layer_arguments("user"))
    assert layer.table.policies == variable.policies
    assert (layer.table.max_capacity, layer.table.eviction) == (1000, "lfu")


def test_a_table_without_an_entry_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(FILE)
    with pytest.raises(ValueError, match=r"has no entry for table 'usr', .*did you mean 'user'\?"):
        tfplugin.policy(path).arguments("usr")
    path.write_text("[[tables]]\nname = 'a'\nmax-capcity = 3\n")
    with pytest.raises(ValueError, match="did you mean max-capacity"):
        tfplugin.policy(path)
    with pytest.raises(ValueError, match="reading the policy"):
        tfplugin.policy(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    "fields",
    [
        'max-capacity = 60\neviction = "lru"',
        'max-capacity = 60\neviction = "lfu"',
        "admission = { count = 3 }",
        "admission = { bloom = 2, capacity = 100, error = 0.5 }",  # a filter that errs
        "admission = { probability = 0.2 }",
        'admission = { count = 2 }\nmax-capacity = 50\neviction = "lfu"',
        "expire-after = 9\npadding-key = 1",
        'expire-after = 9\nmax-capacity = 60\nadmission = { count = 2, below = "zeros" }',
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_a_simulation_has_the_rows_of_a_variable_fed_the_same_log(tmp_path: Path, fields: str, fused: bool) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f'[[tables]]\nname = "t"\n{fields}\n')
    variable = tfplugin.get_kv_variable("t", 2, **tfplugin.policy(path).arguments("t"))
    optimizer: Any = tf.keras.optimizers.SGD(0.1) if fused else tf.keras.optimizers.Adamax(0.1)
    optimizer = tfplugin.OptimizerWrapper(optimizer) if not fused else optimizer

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, ids))
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    simulated = SimulatedTable("t", read_policy(str(path)).training("t"))
    rng = np.random.default_rng(0)
    for ids in np.split(rng.zipf(1.3, 1200) % 400, 40):
        step(tf.constant(ids))
        simulated.step(ids)
    assert int(variable.size()) == simulated.rows  # with those past their age, which the export collects
    keys = np.sort(np.concatenate([chunk[0] for chunk in simulated.table.export([])]))
    there = simulated.table.contains(keys)
    assert sorted(variable.export()[0].numpy().tolist()) == keys[there].tolist()
    assert int(variable.evicted_rows()) == simulated.table.evicted_rows
    assert 10 < len(keys[there]) < simulated.keys
