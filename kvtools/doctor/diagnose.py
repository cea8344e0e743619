"""All checks, by section."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtools.doctor.caches import check_caches
from kvtools.doctor.check import Check
from kvtools.doctor.cuda import check_cuda
from kvtools.doctor.installation import check_installation
from kvtools.doctor.machine import check_machine
from kvtools.doctor.optional_packages import check_packages
from kvtools.doctor.serving import check_serving
from kvtools.doctor.tensorflow import check_tensorflow

SECTIONS: dict[str, Callable[[], Iterator[Check]]] = {
    "kvtools": check_installation,
    "machine": check_machine,
    "tensorflow": check_tensorflow,
    "cuda": check_cuda,
    "packages": check_packages,
    "serving": check_serving,
    "caches": check_caches,
}


def diagnose(leave_out: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[Check]]]:
    """Yield the name of each section and what its checks found, as they are done.

    A check that fails in a way that nobody thought of is an error of that section, and not the end of the others.

    Example:
        >>> dict(diagnose(frozenset(SECTIONS) - {"kvtools"})).keys()
        dict_keys(['kvtools'])
    """
    for section, checks in SECTIONS.items():
        if section in leave_out:
            continue
        found: list[Check] = []
        try:
            found.extend(checks())
        except Exception as error:
            found.append(
                Check(section, "error", f"looking at it failed: {error!r}", "report this with the output of --json")
            )
        yield section, found
