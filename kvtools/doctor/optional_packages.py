"""The packages that each extra brings: which are here, which are too old, which are missing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator

from kvtools.doctor.check import Check

#: What each extra is for; those that only developers need are left out.
EXTRAS = {
    "tensorflow": "training",
    "formats": "HDF5, Arrow, Parquet, Redis and safetensors",
    "report": "`kvtools report`",
    "sql": "`kvtools sql`",
    "remote": "checkpoints behind URLs, s3:// and others",
    "explore": "`kvtools explore` in a terminal",
    "serve": "`kvtools serve`",
    "grpc": "`kvtools serve --grpc-port`",
    "ray": "`--engine ray`",
}
_REQUIREMENT = re.compile(r"^(?P<name>[\w.-]+)(?:\[[^\]]*\])?\s*(?P<range>[^;]*?)\s*(?:;(?P<marker>.*))?$")
_EXTRA = re.compile(r"""extra == ["']([\w-]+)["']""")


def check_packages() -> Iterator[Check]:
    """A check for what is always needed, and one for each extra."""
    try:
        requirements = importlib.metadata.requires("kvtools") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "packages", "error", "kvtools is not installed, so what it needs is not known", "pip install kvtools"
        )
        return
    for extra in ("", *EXTRAS):
        wanted = [one for one in map(_parsed, requirements) if one is not None and one[2] == extra]
        yield _check(extra, [(name, allowed) for name, allowed, _ in wanted])
    yield from _check_what_tensorflow_needs()
    yield from _check_pyarrow()
    yield _check_tensorboard()


def _tensorflow() -> str | None:
    """The TensorFlow that is here, as pip names it; None without one."""
    for name in ("tensorflow", "tensorflow-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name}=={importlib.metadata.version(name)}"
    return None


def _check_what_tensorflow_needs() -> Iterator[Check]:
    """What pip has put in the place of a package that TensorFlow needs in another version."""
    if (tensorflow := _tensorflow()) is None:
        return
    wrong = []
    requirements = importlib.metadata.requires(tensorflow.partition("==")[0]) or []
    for name, allowed, extra in filter(None, map(_parsed, requirements)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            if not extra and not allows(allowed, version):
                wrong.append(f"{name} is {version}, and TensorFlow needs {allowed}")
    if wrong:
        advice = f"pip install '{tensorflow}', with what else is wanted in the same command, as 'kvtools[serve,grpc]'"
        yield Check("TensorFlow's own", "warning", "; ".join(wrong), advice)


def _check_pyarrow() -> Iterator[Check]:
    """Whether it can be imported: later ones refuse NumPy 1, and do not say so to pip."""
    try:
        importlib.metadata.version("pyarrow")
        importlib.import_module("pyarrow")
    except importlib.metadata.PackageNotFoundError:
        return
    except ImportError as error:
        yield Check("pyarrow", "warning", f"cannot be imported: {error}", "with NumPy 1: pip install 'pyarrow<25'")


def _check_tensorboard() -> Check:
    """Not every TensorFlow brings it."""
    try:
        return Check("tensorboard", "ok", f"tensorboard {importlib.metadata.version('tensorboard')}")
    except importlib.metadata.PackageNotFoundError:
        use = (
            "without tensorboard, for Keras's callback TensorBoard with histogram_freq, and to look at what is written"
        )
        return Check("tensorboard", "note", use, "pip install tensorboard")


def _check(extra: str, wanted: list[tuple[str, str]]) -> Check:
    missing: list[str] = []
    wrong: list[str] = []
    present: list[str] = []
    for name, allowed in wanted:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if allows(allowed, version):
            present.append(f"{name} {version}")
        else:
            wrong.append(f"{name} is {version}, wanted is {allowed}")
    install = f"pip install 'kvtools[{extra}]'" if extra else "pip install --upgrade --force-reinstall kvtools"
    if extra not in ("", "tensorflow") and (tensorflow := _tensorflow()):
        install += f" '{tensorflow}'"  # pip would put packages in the place of those that it needs
    title = f"[{extra}]" if extra else "always needed"
    use = f", for {EXTRAS[extra]}" if extra else ""
    if wrong or (missing and not extra):
        found = "; ".join([*wrong, *(f"{name} is missing" for name in missing)])
        return Check(title, "warning" if extra else "error", found + use, install)
    if missing:
        return Check(title, "note", f"without {', '.join(missing)}{use}", install)
    return Check(title, "ok", ", ".join(present))


def _parsed(requirement: str) -> tuple[str, str, str] | None:
    """Name, range and extra of a requirement; None for one that is for another Python."""
    match = _REQUIREMENT.match(requirement)
    if match is None:
        return None
    marker = match["marker"] or ""
    extra = _EXTRA.search(marker)
    if "python_version" in marker:  # tomllib is in the standard library where this is asked
        bound = re.search(r"""python_version < ["']3\.(\d+)["']""", marker)
        if bound is None or sys.version_info[:2] >= (3, int(bound[1])):
            return None
    return match["name"], match["range"], extra[1] if extra else ""


def allows(allowed: str, version: str) -> bool:
    """Tell whether a range such as ">=2.16,<2.22" has a version in it, as far as numbers go.

    >>> allows(">=0.12,<0.29", "0.28.1"), allows(">=0.12,<0.29", "0.29.0"), allows("", "1")
    (True, False, True)
    """
    for part in filter(None, (part.strip() for part in allowed.split(","))):
        match = re.match(r"(>=|<=|==|!=|~=|>|<)\s*([\d.]+)", part)
        if match is None:
            continue
        # As many numbers as the bound has, but no fewer than the version: 2.16 and 2.16.0 are the same.
        a, b = (_numbers(one) for one in (version, match[2]))
        length = max(len(a), len(b))
        a, b = a + [0] * (length - len(a)), b + [0] * (length - len(b))
        fits = {">=": a >= b, "<=": a <= b, ">": a > b, "<": a < b, "==": a == b, "!=": a != b, "~=": a >= b}
        if not fits[match[1]]:
            return False
    return True


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", version)[0])]  # type: ignore[index]
