"""`--quiet`, `--color` and `--string-keys`, which every command has, before its name and after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtools.cli.main import COMMANDS, main

Capture = pytest.CaptureFixture[str]
LARGE = 9223372036854775807


@pytest.fixture(autouse=True)
def here(sample_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(sample_path.parent)
    return sample_path.parent


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_them_and_help_that_fits_the_terminal(command: str, command_line) -> None:
    ran = command_line([command, "--help"], 60)
    text, _, examples = ran.out.partition("Examples:")
    text += examples.partition("\n\n")[2]
    assert ran.status == 0 and all(len(line) <= 60 for line in text.splitlines()), text
    assert "-q, --quiet" in text and "--color auto|always|never" in text
    assert ("--string-keys" in text) == ("--json" in text)


@pytest.mark.parametrize("quiet", ["-q", "--quiet"])
@pytest.mark.parametrize("place", [0, 1, None])
def test_quiet_commands_that_write_or_check_say_nothing(quiet: str, place: int | None, capsys: Capture) -> None:
    for line in ("clip sample out.ckpt --max-abs 0 --force", "verify sample", "get sample 5 --output rows.npz --force"):
        words = line.split()
        words.insert(len(words) if place is None else place, quiet)
        assert main(words) == 0
        assert capsys.readouterr() == ("", "")
    assert Path("out.ckpt.index").exists() and Path("rows.npz").exists()


def test_quiet_tells_what_is_left_out(capsys: Capture) -> None:
    line = ["migrate", "sample", "out", "--to", "tfra_files"]
    assert main(line) == 0
    lost = [one for one in capsys.readouterr().out.splitlines() if one.startswith("left out: ")]
    assert main([*line, "-q", "--force"]) == 0
    assert lost and capsys.readouterr() == ("", "".join(f"kvtools: {one}\n" for one in lost))
    assert main([*line, "-q", "--force", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("would be left out: ") == len(lost)


def test_quiet_on_a_terminal_says_nothing_either(command_line) -> None:
    ran = command_line(["clip", "sample", "out.ckpt", "--max-abs", "0", "-q"], 60)
    assert (ran.status, ran.out, ran.err) == (0, "", "")


def test_quiet_keeps_answers_errors_and_verdicts(here: Path, capsys: Capture) -> None:
    for line, status in (("inspect sample", 0), ("get sample 5", 0), ("clip sample --max-abs 1 --dry-run", 0)):
        assert main(line.split()) == status
        loud = capsys.readouterr()
        assert main([*line.split(), "-q"]) == status
        assert capsys.readouterr() == loud and loud.out
    assert main(["clip", "sample", "a.ckpt", "--max-abs", "0", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["output"].endswith("a.ckpt")
    assert main(["diff", "sample", "gone", "-q"]) == 1
    assert capsys.readouterr().err.startswith("kvtools: looking for a checkpoint at 'gone'")
    assert main(["diff", "sample", "sample", "-q"]) == 0 and capsys.readouterr() == ("", "")


def test_keys_are_strings_in_json_where_that_is_asked_for(capsys: Capture) -> None:
    def said(*arguments: str) -> str:
        assert main([*arguments]) in (0, 3)
        return capsys.readouterr().out

    get = ["get", "sample", str(LARGE), "99", "--table", "ads/emb", "--columns", "freq"]
    assert json.loads(said(*get, "--json")) == {
        "rows": [{"table": "ads/emb", "key": LARGE, "freq": 11}],
        "missing": [99],
    }
    strings = {"rows": [{"table": "ads/emb", "key": str(LARGE), "freq": 11}], "missing": ["99"]}
    assert json.loads(said("--string-keys", *get, "--json")) == strings
    assert json.loads(said(*get, "--json", "--string-keys")) == strings
    assert json.loads(said(*get, "--json-lines", "--string-keys")) == strings["rows"][0]
    rows = json.loads(said("inspect", "sample", "--keys", "5", "--json", "--string-keys"))["rows"]
    assert [row["key"] for row in rows] == ["5"] and isinstance(rows[0]["freq"], int)
    assert main(["clip", "sample", "less.ckpt", "--min-freq", "5", "--table", "ads/emb", "-q"]) == 0
    diff = json.loads(said("diff", "sample", "less.ckpt", "--json", "--string-keys"))
    keys = next(table["removed_keys"] for table in diff["tables"] if table["removed"])
    assert keys and all(isinstance(key, str) for key in keys)


@pytest.mark.parametrize(
    ("arguments", "environment", "columns", "colored"),
    [
        ([], {}, 80, True),
        ([], {}, None, False),
        ([], {"NO_COLOR": "1"}, 80, False),
        ([], {"NO_COLOR": ""}, 80, True),
        ([], {"TERM": "dumb"}, 80, False),
        ([], {"FORCE_COLOR": "1"}, None, True),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, 80, False),
        (["--color", "never"], {"FORCE_COLOR": "1"}, 80, False),
        (["--color", "always"], {"NO_COLOR": "1", "TERM": "dumb"}, None, True),
        (["--color=auto"], {}, 80, True),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_colours(command_line, monkeypatch, arguments, environment, columns, colored: bool, before: bool) -> None:
    with command_line.screen(columns, color=True) as screen, monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        words = [*arguments, "inspect", "sample"] if before else ["inspect", "sample", *arguments]
        assert main(words) == 0
        assert ("\x1b[1mtable" in screen.getvalue()) == colored


def test_what_is_said_in_one_run_is_not_in_the_next(capsys: Capture) -> None:
    assert main(["--color", "always", "-q", "inspect", "sample"]) == 0
    assert "\x1b[" in capsys.readouterr().out
    assert main(["verify", "sample"]) == 0
    text = capsys.readouterr().out
    assert text and "\x1b[" not in text


def test_a_colour_that_is_none_is_named(capsys: Capture) -> None:
    assert main(["inspect", "sample", "--color", "red"]) == 2
    assert capsys.readouterr().err == "kvtools: got --color red, expected auto, always, never\n"


@pytest.mark.parametrize(
    ("line", "said"),
    {
        "get sample --where freq>9 --where freq<11": (
            "got --where 2 times, expected it once; join conditions with `and`"
        ),
        "clip sample o.ckpt --drop-where=freq<3 --drop-where norm<1": (
            "got --drop-where 2 times, expected it once; join conditions with `or`"
        ),
        "clip sample o.ckpt --min-freq 2 --min-freq 3": "got --min-freq 2 times, expected it once",
        "get sample 5 --columns freq --columns norm": (
            "got --columns 2 times, expected it once; join names with commas"
        ),
        "get sample --keys-file a.txt --keys-file b.txt": "got --keys-file 2 times, expected it once",
        "top sample -n 3 --limit 4": "got --limit 2 times, expected it once",
    }.items(),
)
def test_an_option_for_one_value_is_given_once(line: str, said: str, capsys: Capture) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr() == ("", f"kvtools: {said}\n")
    assert not Path("o.ckpt.index").exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["verify", ""], "PATH"),
        (["diff", "sample", ""], "B"),
        (["clip", "sample", "", "--l2", "1"], "OUT"),
        (["merge", "sample", "", "o.ckpt"], "PATH... OUT"),
        (["export", "sample", "--savedmodel="], "--savedmodel"),
        (["serve", "--follow", ""], "--follow"),
    ],
)
def test_an_empty_name_is_not_the_working_folder(words: list[str], name: str, capsys: Capture) -> None:
    assert main(words) == 2
    said = f"kvtools: got an empty {name}, expected a file or folder, . for this one: is a variable not set?\n"
    assert capsys.readouterr() == ("", said)


def test_options_for_several_values_and_flags_may_come_again(capsys: Capture) -> None:
    line = "get sample 5 42 --table ads/emb --table user_emb --json --json -q -q"
    assert main(line.split()) == 0
    assert {row["table"] for row in json.loads(capsys.readouterr().out)["rows"]} <= {"ads/emb", "user_emb"}
