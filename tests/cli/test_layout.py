from __future__ import annotations

import pytest

from kvtools.cli.layout import columns, shown, size
from kvtools.cli.terminal import display_width, prose

HEADER = ["table", "dialect", "rows kept", "slots", "bytes"]
ROWS = [
    ["towers/user_embedding", "tfplugin", "1,234,567,890", "Adam.m, Adam.v", "1.5 GiB"],
    ["towers/item_embedding", "tfplugin", "7", "Adam.m, Adam.v", "12 B"],
]
RIGHT = frozenset({2, 4})


def test_columns_are_never_cut_off() -> None:
    long = "scope/" * 40
    assert columns(["a", "b"], [[long, "1"]]).splitlines()[1] == f"{long}  1"


def test_the_words_of_a_header_go_below_one_another_first(command_line) -> None:
    rows = [["emb", "5"], ["user", "12"]]
    with command_line.screen(20):
        assert columns(["table", "rows that were kept"], rows, right=frozenset({1})).splitlines() == [
            "       rows that",
            "table  were kept",
            "emb            5",
            "user          12",
        ]


def test_what_every_row_says_is_said_once(command_line) -> None:
    with command_line.screen(60):
        assert columns(HEADER, ROWS, right=RIGHT).splitlines() == [
            "table                  dialect       rows kept    bytes",
            "towers/user_embedding  tfplugin  1,234,567,890  1.5 GiB",
            "towers/item_embedding  tfplugin              7     12 B",
            "all: slots Adam.m, Adam.v",
        ]


def test_text_is_broken_between_words_and_numbers_are_not(command_line) -> None:
    rows = [["towers/user_embedding", "123456789", "0.25 -1.5 3e-07 12.5"], ["b", "5", "1"]]
    with command_line.screen(40):
        assert columns(["table", "key", "value"], rows, right=frozenset({1})).splitlines() == [
            "table                key  value",
            "towers/user_   123456789  0.25 -1.5",
            "embedding                 3e-07 12.5",
            "b                      5  1",
        ]


def test_where_nothing_else_fits_each_row_is_a_block(command_line) -> None:
    with command_line.screen(30):
        assert columns(HEADER, ROWS, right=RIGHT).splitlines() == [
            "table      towers/user_",
            "           embedding",
            "rows kept  1,234,567,890",
            "bytes      1.5 GiB",
            "",
            "table      towers/item_",
            "           embedding",
            "rows kept  7",
            "bytes      12 B",
            "all: dialect tfplugin; slots",
            "  Adam.m, Adam.v",
        ]


@pytest.mark.parametrize("room", [20, 30, 40, 50, 60, 70, 80, 100, None])
def test_every_cell_is_there_at_every_width(command_line, room: int | None) -> None:
    rows = [["a/b_c", f"{n:,}", " ".join([f"w{n}"] * 5), str(n * 10**5), "same"] for n in (0, 7, 1_000_000)]
    with command_line.screen(room):
        text = columns(["name", "rows", "words", "key", "all alike"], rows, right=frozenset({1, 3}))
    assert text.count("same") in (1, 3)
    for _, count, words, key, _ in rows:
        assert count in text.split() and key in text.split()
        assert text.split().count(words.split()[0]) == 5
    if room is not None:
        assert all(len(line) <= room for line in text.splitlines())


def test_a_header_is_bold_where_there_are_colours(command_line) -> None:
    with command_line.screen(60, color=True):
        assert columns(["a"], [["1"]]) == "\x1b[1ma\x1b[0m\n1"
    with command_line.screen(None, color=True):
        assert columns(["a"], [["1"]]) == "a\n1"


def test_wide_characters_keep_columns_straight() -> None:
    assert display_width("用户/emb") == 8
    assert columns(["table", "rows"], [["用户", "1"], ["emb", "2"]]).splitlines() == [
        "table  rows",
        "用户   1",
        "emb    2",
    ]


def test_prose_breaks_between_words_only(command_line) -> None:
    line = "left out: user_emb: slots of /a/very/long/path/that/nobody/breaks/ever.ckpt are not held"
    assert prose(line) == line
    with command_line.screen(40):
        assert prose(line).splitlines() == [
            "left out: user_emb: slots of",
            "  /a/very/long/path/that/nobody/breaks/ever.ckpt",
            "  are not held",
        ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 40, "5.0 TiB"), (5 << 50, "5120.0 TiB")],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_names_cannot_drive_the_terminal() -> None:
    assert shown("a\x1b[31m\udcff\n") == "a\\x1b[31m\\udcff\\n"
