from __future__ import annotations

import pytest

from kvtools.cli.layout import columns, shown, size


def test_columns_are_never_cut_off() -> None:
    long = "scope/" * 40
    assert columns(["a", "b"], [[long, "1"]]).splitlines()[1] == f"{long}  1"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 40, "5.0 TiB"), (5 << 50, "5120.0 TiB")],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_names_cannot_drive_the_terminal() -> None:
    assert shown("a\x1b[31m\udcff\n") == "a\\x1b[31m\\udcff\\n"
