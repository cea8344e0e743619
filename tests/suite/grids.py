"""Which tests `make test` runs, and which wait for `make test-all`.

A test that says nothing is in `make test`, so it must be cheap. `@pytest.mark.thorough` (on a test, a case or, as
`pytestmark`, a file) leaves it to `make test-all`. Of a grid, a test with two parameters or more, `make test` runs the
cases that bring a value which no case before them had: the first case, and from there each other value of each
parameter once. The rest of the product is thorough by this rule. Where combinations decide,
`@pytest.mark.every_case("a", "b")` keeps those of the named parameters, and without names all.

    pytest -m "not thorough"      what `make test` runs
    pytest                        everything
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough: `make test` leaves this out, and `make test-all` runs it")
    config.addinivalue_line("markers", "every_case(*names): `make test` runs every combination of these parameters")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_rest_of_grids(items)


def mark_rest_of_grids(items: Iterable[pytest.Item]) -> None:
    """Mark as thorough the cases of grids that bring no new value of any parameter."""
    seen: dict[str, set[tuple[object, ...]]] = {}
    for item in items:
        values = parameter_values(item)
        if len(values) < 2 or item.get_closest_marker("thorough"):
            continue
        before = seen.setdefault(item.nodeid.split("[")[0], set())
        if before.issuperset(values):
            item.add_marker("thorough")
        before.update(values)


def parameter_values(item: pytest.Item) -> set[tuple[object, ...]]:
    """The values that a case has, one for each `parametrize` and each fixture with parameters.

    The names of one `parametrize` belong together, as those of `every_case` do: their values are a list of cases and no
    product. Values are told apart by identity, since some have no other; all cases of a test share them.
    """
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    groups = [set(_names(mark.args[0])) & params.keys() for mark in item.iter_markers("parametrize")]
    groups += [{name} for name in params.keys() - set().union(*groups)]
    for mark in item.iter_markers("every_case"):
        kept = set(mark.args or params)
        together = [group for group in groups if group & kept]
        groups = [group for group in groups if not group & kept] + [set().union(*together)]
    return {tuple((name, id(params[name])) for name in sorted(group)) for group in groups}


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip()) if isinstance(names, str) else tuple(names)
