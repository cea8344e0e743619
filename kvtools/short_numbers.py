"""Numbers and sizes in a few characters."""

from __future__ import annotations


def short_number(value: float, *, binary: bool = False, digits: int = 3) -> str:
    """Write a number in a few characters.

    >>> short_number(1500), short_number(2e6), short_number(0.25), short_number(3 << 30, binary=True)
    ('1.5k', '2M', '0.25', '3 GiB')
    """
    base, units = (1024.0, (" B", " KiB", " MiB", " GiB", " TiB")) if binary else (1000.0, ("", "k", "M", "G", "T"))
    number, unit = float(value), 0
    while abs(number) >= base and unit < len(units) - 1:
        number /= base
        unit += 1
    return f"{number:.{digits if abs(number) < 10**digits else 4}g}{units[unit]}"
