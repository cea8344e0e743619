"""A Keras 3 that is too old is named as its layers are imported."""

import types
import warnings

import pytest

from tfplugin.embedding_layers.old_keras import warn_of_old_keras


def test_a_keras_3_that_is_too_old_is_named_with_the_way_to_a_newer_one():
    with pytest.warns(UserWarning, match=r"tfplugin.keras: Keras 3.3.3 is older than .*: pip install .*'keras>=3"):
        warn_of_old_keras(types.SimpleNamespace(__version__="3.3.3"), "tfplugin.keras")


@pytest.mark.parametrize("version", ["3.15.1", "2.16.0"])
def test_a_newer_one_and_tf_keras_are_not(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_old_keras(types.SimpleNamespace(__version__=version), "tfplugin.keras")
