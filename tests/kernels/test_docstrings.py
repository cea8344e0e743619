"""The examples in the module's docstrings do what they say."""

import doctest

import numpy as np

from kvtools import _kvtable


def test_examples():
    parser = doctest.DocTestParser()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    scope = {"np": np, **vars(_kvtable)}
    documented = [_kvtable.Table, _kvtable.hash_key, _kvtable.initial_values]
    documented += [_kvtable.optimizers, _kvtable.apply_to_arrays]
    documented += [getattr(_kvtable.Table, name) for name in vars(_kvtable.Table) if not name.startswith("_")]
    examples = 0
    for thing in documented:
        test = parser.get_doctest(thing.__doc__ or "", dict(scope), str(thing), None, None)
        examples += len(test.examples)
        runner.run(test)
    assert runner.failures == 0
    assert examples >= 30
