"""Rows of numbers as lines of text. Compiled from kernels/python/row_text_module.cc."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

def csv_lines(columns: Sequence[npt.NDArray[Any]], begin: int, end: int) -> bytes: ...
