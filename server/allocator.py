"""How the C library keeps memory that was freed: answers of a megabyte are best made where the last one was.

Left to itself, glibc gives the pages of each back to the system and takes new ones, which the kernel fills with zeros:
at 10,000 keys of 32 numbers that is up to half of a request's time.
https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
_KEPT = 256 << 20
_LARGEST = 32 << 20  # the most that glibc takes


def keep_freed_memory() -> None:
    """Keep up to 256 MiB that were freed, in one place for all threads; does nothing where the C library is another."""
    _set({_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: _KEPT, _ARENA_MAX: 1})


def expect_many_threads() -> None:
    """Let threads have memory of their own, as TensorFlow's want it."""
    _set({_ARENA_MAX: 8 * (os.cpu_count() or 1)})


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
