"""What `make wheels` and `make matrix` do around the building and testing itself."""

import hashlib
import json
import os
import sys
import zipfile

import pytest

OPS = "kvtools/ops/ready/tensorflow-2.21/libkvtools_ops.so"


def a_python(path, program):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)


def test_interpreters_that_lead_nowhere_are_passed_over(module, tmp_path, monkeypatch):
    a_python(tmp_path / "path/python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    a_python(tmp_path / "path/python3.11", "echo 3.11 pypy /opt/pypy")
    for patch in ("3.12.1", "3.12.10", "3.12-dev"):
        a_python(tmp_path / f"pyenv/versions/{patch}/bin/python", f"echo 3.12 cpython /{patch}")
    a_python(tmp_path / "mine/python", "echo 3.10 cpython /mine")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    found, missing = module("interpreters").find_interpreters(["3.12", "3.11", "3.13", str(tmp_path / "mine/python")])
    assert found == {
        "3.10": str(tmp_path / "mine/python"),
        "3.12": str(tmp_path / "pyenv/versions/3.12.10/bin/python"),
    }
    assert missing == ["3.11", "3.13"]


def test_tensorflows_are_named_by_minor_version_or_release(module):
    tensorflows = module("tensorflows")
    assert [minor.newest for minor in tensorflows.minors("2.21.0 2.16")] == ["2.21.0", "2.16.2"]
    assert tensorflows.minors("") == list(tensorflows.MINORS)
    with pytest.raises(SystemExit, match=r"2\.15 is not known: expected one of 2\.16"):
        tensorflows.minors("2.15")


def test_the_range_that_is_supported_is_the_one_that_wheels_are_built_for(module):
    from kvtools import op_library

    names = [tuple(map(int, minor.name.split("."))) for minor in module("tensorflows").MINORS]
    assert (names[0], names[-1]) == (op_library.FIRST_TENSORFLOW, op_library.LAST_TENSORFLOW)


def test_patch_releases_are_served_by_the_same_ops_only_if_their_headers_are_the_same(module):
    differing = module("build")._differing
    headers = {"tensorflow/core/public/version.h": "a", "tensorflow/core/framework/op.h": "b", "external/curl/a.h": "c"}
    assert differing(headers, {**headers, "tensorflow/core/public/version.h": "z", "external/curl/a.h": "z"}) == []
    assert differing(headers, {**headers, "tensorflow/core/framework/op.h": "z"}) == ["tensorflow/core/framework/op.h"]
    assert differing(headers, {**headers, "Eigen/Core": "z"}) == ["Eigen/Core"]


def test_what_was_changed_since_the_last_source_distribution_is_compiled_again(module, tmp_path):
    build = module("build")
    always = 1_668_000_000.0  # of all files of a source distribution

    def unpacked(**files):
        before = build._contents(tmp_path)
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            os.utime(tmp_path / name, (always, always))
        build.date_changes(tmp_path, before)
        return {name: (tmp_path / name).stat().st_mtime for name in files}

    first = unpacked(same="a", changed="a")
    assert min(first.values()) > always
    second = unpacked(same="a", changed="b", new="a")
    assert second["same"] == first["same"]
    assert second["changed"] > first["changed"] and second["new"] > first["same"]


def a_wheel(path, **changed):
    content = {
        "kvtools/libkvtable.so": "engine",
        "kvtools/cli/main.py": "",
        "kvtools/server/app.py": "",
        "tfplugin/__init__.py": "",
        OPS: "ops",
        OPS.replace("libkvtools_ops.so", "built_for.json"): json.dumps({"library": hashlib.sha256(b"ops").hexdigest()}),
        **changed,
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in content.items():
            if text is not None:
                archive.writestr(name, text)
    return path


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({OPS: "stripped"}, "was changed on the way"),
        ({"kvtools/libkvtable.so": None}, "lacks kvtools/libkvtable.so"),
        ({"kvtools.libs/libtensorflow_framework.so.2": ""}, "do not belong there"),
        ({"tests/conftest.py": ""}, "do not belong there"),
    ],
    ids=["library", "engine", "grafted", "tests"],
)
def test_a_wheel_that_is_not_as_it_should_be_is_not_shipped(module, tmp_path, changed, said):
    check = module("build").check_wheel
    check(a_wheel(tmp_path / "good.whl"))
    with pytest.raises(SystemExit, match=said):
        check(a_wheel(tmp_path / "bad.whl", **changed))


def test_a_stable_abi_needs_one_wheel(module):
    served = module("build")._served_by_another
    pythons = {"3.10": "", "3.11": "", "3.12": "", "3.13": ""}
    assert [version for version in pythons if not served(version, pythons)] == ["3.10", "3.11", "3.12"]
    assert not served("3.13", {"3.11": "", "3.13": ""})


def test_the_tests_of_the_matrix_are_there(module):
    matrix = module("matrix")
    assert [name for name in matrix.CORE if not (matrix.ROOT / name).exists()] == []


def test_the_table_has_every_pair_and_says_what_was_not_run(module, tmp_path, monkeypatch):
    matrix = module("matrix")
    result = {"tensorflow": "2.16.2", "keras": "3.12.4", "numpy": "1.26.4", "passed": 412, "failed": 0}
    results = tmp_path / "matrix"
    results.mkdir()
    for python, changed in {"3.10": {}, "3.11": {"failed": 2, "passed": 410}}.items():
        name = f"tensorflow-2.16.2-python-{python}.json"
        (results / name).write_text(json.dumps({**result, "python": python, **changed}))
    monkeypatch.setattr(matrix, "RESULTS", results)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{matrix.BEGIN}old\n{matrix.END}after\n")
    matrix.write_page(page)
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert (
        "| 2.16.2 | 412 passed | **2 failed**, 410 passed | not run | no TensorFlow for it | 3.12.4 | 1.26.4 |" in lines
    )
    assert any(line.startswith("| 2.21.0 | not run | not run | not run | not run |") for line in lines)
    again = {**result, "python": "3.12", "passed": 500, "keras": "3.15.1"}
    for old in results.iterdir():
        old.unlink()
    (results / "tensorflow-2.16.2-python-3.12.json").write_text(json.dumps(again))
    matrix.write_page(page)
    stays = "| 2.16.2 | 412 passed | **2 failed**, 410 passed | 500 passed | no TensorFlow for it | 3.12.4, 3.15.1 |"
    assert any(line.startswith(stays) for line in page.read_text().splitlines())


def test_failures_are_counted_and_named(module, tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="one"/><testcase classname="a" name="two"><failure/>'
        '</testcase><testcase classname="b" name="three"><skipped/></testcase></testsuite></testsuites>'
    )
    assert module("matrix")._counts(report) == ({"passed": 1, "skipped": 1}, ["a::two"])
    assert module("matrix")._counts(tmp_path / "none") == ({"passed": 0, "skipped": 0}, [])


def test_what_fails_ends_the_program_with_what_it_said(module):
    with pytest.raises(SystemExit, match=r"(?s)no room left.*failed \(3\)"):
        module("environments").run([sys.executable, "-c", "print('no room left'); raise SystemExit(3)"])
