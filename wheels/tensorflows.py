"""The TensorFlows that wheels have ready ops for, and the Pythons that each of them has wheels for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Minor:
    """A minor version of TensorFlow.

    Attributes:
        name: such as "2.16".
        releases: those that there are, the one that ops are compiled against and tests run with first.
        pythons: the minor versions of Python that it has wheels for, of those that kvtools supports.
    """

    name: str
    releases: tuple[str, ...]
    pythons: tuple[str, ...]

    @property
    def newest(self) -> str:
        """The newest release."""
        return self.releases[0]


_UP_TO_312 = ("3.10", "3.11", "3.12")

PYTHONS = (*_UP_TO_312, "3.13")

MINORS = (
    Minor("2.16", ("2.16.2", "2.16.1"), _UP_TO_312),
    Minor("2.17", ("2.17.1", "2.17.0"), _UP_TO_312),
    Minor("2.18", ("2.18.1", "2.18.0"), _UP_TO_312),
    Minor("2.19", ("2.19.1", "2.19.0"), _UP_TO_312),
    Minor("2.20", ("2.20.0",), PYTHONS),
    Minor("2.21", ("2.21.0",), PYTHONS),
)


def minors(names: str) -> list[Minor]:
    """Return the minor versions that are named ("2.16 2.21", or releases of them), all of them for "".

    Raises:
        SystemExit: there is no such version.
    """
    found = []
    for name in names.split() or [minor.name for minor in MINORS]:
        matching = [minor for minor in MINORS if name == minor.name or name in minor.releases]
        if not matching:
            raise SystemExit(f"TensorFlow {name} is not known: expected one of {', '.join(m.name for m in MINORS)}")
        found += [minor for minor in matching if minor not in found]
    return found
