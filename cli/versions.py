"""`--keep` and `--next-version`: outputs that are versions of a model, in a folder that a server watches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtools.errors import OutputError
from kvtools.version_folders import check_version, next_version, outdated, remove_versions

NextVersion = Annotated[
    bool,
    typer.Option("--next-version", help="OUT is a folder of versions: write the next one into it, such as OUT/8."),
]
Keep = Annotated[
    int | None,
    typer.Option(
        "--keep", metavar="K", help="Then remove all but the K newest versions of those that kvtools wrote beside it."
    ),
]


@dataclass
class OldVersions:
    """Which versions beside an output go once it is there; `removed` are those that went."""

    output: Path
    keep: int | None
    removed: list[Path] = field(default_factory=list)

    def remove(self) -> None:
        """Remove them; what cannot be removed is a warning."""
        if self.keep is not None:
            self.removed, faults = remove_versions(outdated(self.output, self.keep))
            for fault in faults:
                print(f"kvtools: warning: {fault}", file=sys.stderr)

    def described(self) -> dict[str, Any]:
        """Return what JSON says of them."""
        return {} if self.keep is None else {"removed": [str(path) for path in self.removed]}

    def print_removed(self) -> None:
        """Say which went."""
        for path in self.removed:
            print(f"removed {path}")

    def planned(self) -> Sequence[Path]:
        """Return which would go."""
        return [] if self.keep is None else outdated(self.output, self.keep)


def version_output(output: Path, *, snapshot: bool, next_one: bool, keep: int | None) -> Path:
    """Return where to write; raises `UsageError` or `OutputError` where the output can be no version."""
    if next_one:
        output = next_version(output, ".kvsnap" if snapshot else "")
    elif output.is_dir() and snapshot and keep is not None:
        raise OutputError(f"writing '{output}': it is a folder; name a version in it, or add --next-version")
    if keep is not None:
        check_version(output, keep)
    return output
