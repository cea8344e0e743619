"""Write tests/data/formats: a small table in each layout of kvtools' own, so that later versions still read it.

PYTHONPATH=tests/kvtools python tests/data/make_formats.py
"""

from __future__ import annotations

from pathlib import Path

import round_trip

from kvtools.dialects.writing import WriteOptions
from kvtools.migrate import write_tables

OUTPUTS = {
    "sample.h5": "hdf5",
    "sample.parquet": "parquet",
    "sample_parquet": "parquet",
    "sample.arrow": "arrow",
    "sample_arrow": "arrow",
}


def main() -> None:
    """Write the files."""
    table = round_trip.table("ads/emb", 30, parts=2)
    for name, dialect in OUTPUTS.items():
        write_tables([table], Path(__file__).parent / "formats" / name, dialect, options=WriteOptions(force=True))


if __name__ == "__main__":
    main()
