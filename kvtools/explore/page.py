"""The page of `kvtools explore`: one HTML file that asks nothing of any network.

Its script and its style are let through by their checksums (a content security policy), so nothing else in the file can
run; what is known of the tables stands in it as JSON, which is data and no program.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools import __version__
from kvtools.dialects.schema import TableSchema, VersionUnit
from kvtools.errors import KvtoolsError, one_line
from kvtools.explore.command import ClipSource, policy_entry, shell_quoted, table_option
from kvtools.explore.cuts import Cuts
from kvtools.explore.survey import Detail, Rows, TableSurvey
from kvtools.json_numbers import json_numbers
from kvtools.thresholds import Threshold
from kvtools.visible_text import html_text, visible

Array = npt.NDArray[Any]

_DAY = 86_400
_YEAR_9999 = 253_402_300_800
_FEW = (10, 30, 50, 70, 90)
_SOME = (5, 10, 20, 30, 50, 70, 80, 90, 95)
_FINE_TABLES, _SOME_TABLES, _NEAR_TABLES = 12, 60, 24
_POINTS = 16_000


def page_details(tables: int, *, points: int = 1000) -> list[Detail]:
    """Return how much the page has of each of so many tables, the largest one first: it stays within 5 MB.

    >>> [(len(one.percentiles), one.points, one.neighbours) for one in page_details(1000)][::400]
    [(19, 1000, 8), (5, 16, 0), (5, 16, 0)]
    """
    rest = max(16, min(400, points, _POINTS // max(1, tables)))
    return [
        Detail(points=points)
        if rank < _FINE_TABLES
        else Detail(
            percentiles=_SOME if rank < _SOME_TABLES else _FEW,
            points=rest,
            hot=10 if rank < _SOME_TABLES else 5,
            asked=5,
            neighbours=5 if rank < _NEAR_TABLES else 0,
        )
        for rank in range(tables)
    ]


def render_page(
    surveys: Iterable[TableSurvey],
    source: ClipSource,
    *,
    title: str,
    about: str,
    broken: Mapping[str, KvtoolsError] | None = None,
    when: datetime | None = None,
) -> str:
    """Return the page about tables, the largest first, as HTML.

    Args:
        surveys: what was found of the tables.
        source: what the command on the page clips.
        title: what stands above.
        about: path and dialect.
        broken: why tables could not be opened, by name.
        when: the time to show, now if None.
    """
    when = when or datetime.now(timezone.utc)
    tables = sorted((_table(survey) for survey in surveys), key=lambda one: -one["bytes"])
    data = {
        "command": {
            "path": shell_quoted(source.path),
            "output": source.output,
            "options": [shell_quoted(option) for option in source.options],
        },
        "tables": tables,
    }
    folder = Path(__file__).parent
    style, script = (f"\n{(folder / name).read_text('utf-8')}" for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src '{_checksum(style)}'; script-src '{_checksum(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html_text(title),
        "about": f'<bdi>{html_text(about)}</bdi> &middot; <time datetime="{when:%Y-%m-%dT%H:%M:%SZ}">'
        f"{when:%Y-%m-%d %H:%M} UTC</time>",
        "style": style,
        "script": script,
        "data": _json(data),
        "broken": "\n".join(
            f'<p class="bad">Table <bdi>{html_text(name)}</bdi> cannot be read: {html_text(one_line(str(error)))}</p>'
            for name, error in (broken or {}).items()
        ),
        "footer": f"Written by kvtools {__version__}. This page is one file, and asks nothing of any network.",
    }
    pieces = re.split(r"\{\{(\w+)\}\}", (folder / "page.html").read_text("utf-8"))
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _table(survey: TableSurvey) -> dict[str, Any]:
    schema = survey.schema
    return {
        "name": visible(schema.name),
        "option": table_option(schema.name),
        "entry": policy_entry(schema.name),
        "rows": schema.rows,
        "bytes": schema.bytes,
        "rowBytes": survey.row_bytes,
        "form": table_form(schema),
        "facts": table_facts(survey),
        "axes": [[_threshold(one) for one in axis] for axis in survey.cuts.axes],
        "why": why_no_thresholds(survey),
        "cells": _packed(survey.cuts),
        "lookups": survey.cuts.lookups is not None,
        "hot": _rows(survey.hot, version_unit_of(survey)) | {"by": survey.hot_by},
        "near": {
            str(key): [[str(other), f"{score:.4f}"] for other, score in zip(keys.tolist(), scores, strict=True)]
            for key, (keys, scores) in survey.near.items()
        },
        "unsigned": schema.key_dtype.startswith("u"),
        "sample": _sample(survey),
    }


def _threshold(threshold: Threshold) -> dict[str, Any]:
    return {
        "label": threshold.label,
        "rows": threshold.rows,
        "options": " ".join(threshold.options),
        "policy": "\n".join(threshold.policy),
    }


def table_form(schema: TableSchema) -> str:
    """Say of what form a table is."""
    slots = f"slots {', '.join(visible(slot.name) for slot in schema.slots)}" if schema.slots else "no slots"
    parts = f"{schema.parts:,} part{'s' if schema.parts > 1 else ''}"
    return f"{schema.key_dtype} keys, {schema.dim} {schema.rows_as or schema.value_dtype} a row, {slots}, {parts}"


def table_facts(survey: TableSurvey) -> list[tuple[str, str]]:
    """Return what stands above a table: numbers, and what they are."""
    facts = [(f"{survey.schema.rows:,}", "rows"), (f"{survey.row_bytes:,} B", "a row, with all slots")]
    if survey.freqs is not None and survey.freqs.total:
        facts.append(
            (f"{100 * (survey.freqs.top_share(0.01) or 0):.3g}%", "of lookups are those of the top 1% of keys")
        )
    median = survey.norms.quantile(0.5)
    if median is not None:
        facts.append((f"{median:.3g}", "median norm"))
    facts.append((f"{survey.zero_rows:,}", "rows all zero"))
    if survey.non_finite_rows:
        facts.append((f"{survey.non_finite_rows:,}", "rows with NaN or infinity"))
    return facts


def why_no_thresholds(survey: TableSurvey) -> list[str]:
    """Return why a criterion has no thresholds, "" where it has some: of frequency, norm and age."""
    schema = survey.schema
    if not schema.rows:
        return ["There are no rows."] * 3
    versions = survey.versions
    unknown = "Nothing says what the versions of this table count: see --version-unit."
    return [
        "" if axis else reason
        for axis, reason in zip(
            survey.cuts.axes,
            [
                "All rows have the same frequency." if schema.has_freqs else "This table records no frequencies.",
                "The norms of all rows are the same.",
                "This table records no versions."
                if versions is None
                else unknown
                if versions.unit == "unknown"
                else "All rows were written at about the same time.",
            ],
            strict=True,
        )
    ]


def version_unit_of(survey: TableSurvey) -> VersionUnit:
    """Return what the versions of a table count."""
    return "unknown" if survey.versions is None else survey.versions.unit


def version_text(version: int, unit: VersionUnit) -> str:
    """Write a version.

    >>> version_text(1700000000, "seconds"), version_text(19000, "days"), version_text(1200, "steps")
    ('2023-11-14 22:13', '2022-01-08', '1,200')
    """
    seconds = version * (_DAY if unit == "days" else 1)
    if unit in ("seconds", "days") and 0 < seconds < _YEAR_9999:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
        return f"{moment:%Y-%m-%d}" if unit == "days" else f"{moment:%Y-%m-%d %H:%M}"
    return "never" if not version and unit in ("seconds", "days") else f"{version:,}"


def _rows(rows: Rows, unit: VersionUnit) -> dict[str, Any]:
    return {
        "keys": [str(key) for key in rows.keys.tolist()],
        "norms": json_numbers(rows.norms),
        "freqs": None if rows.freqs is None else rows.freqs.tolist(),
        "versions": None if rows.versions is None else [version_text(one, unit) for one in rows.versions.tolist()],
    }


def _sample(survey: TableSurvey) -> dict[str, Any]:
    projection = survey.projection
    sample = survey.sample.take(projection.rows)
    spread = np.ptp(projection.points, axis=0) if len(projection.points) else np.ones(2)
    lowest = projection.points.min(axis=0) if len(projection.points) else np.zeros(2)
    places = ((projection.points - lowest) / np.where(spread > 0, spread, 1) * 65535).round()
    places = np.where(spread > 0, places, 32768)
    with np.errstate(over="ignore"):  # to infinity, which is shown as such
        norms = sample.norms.astype("<f4")
    explained = [f"{100 * share:.3g}%" for share in projection.explained]
    return {
        "keys": _base64(sample.keys.astype("<u8" if survey.schema.key_dtype.startswith("u") else "<i8")),
        "x": _base64(places[:, 0].astype("<u2")),
        "y": _base64(places[:, 1].astype("<u2")),
        "norms": _base64(norms),
        "freqs": None if sample.freqs is None else _base64(sample.freqs.astype("<f8")),
        "explained": f"{explained[0]} and {explained[1]} of the variance",
    }


def _packed(cuts: Cuts) -> str:
    """Return the cells that have rows: how much further on each is, its rows, and its lookups, 7 bits to a byte."""
    counts = cuts.counts.ravel()
    filled = np.flatnonzero(counts)
    columns = [np.diff(filled, prepend=-1), counts[filled]]
    if cuts.lookups is not None:
        columns.append(np.minimum(cuts.lookups.ravel()[filled], 2.0**62).astype(np.int64))
    packed = bytearray()
    for number in np.stack(columns, axis=1).ravel().tolist() if len(filled) else []:
        while number >= 128:
            packed.append(number & 127 | 128)
            number >>= 7
        packed.append(number)
    return base64.b64encode(packed).decode()


def _base64(array: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _json(data: Any) -> str:
    """Return JSON that nothing in it can end: no `<`, and none of the line ends that only some know."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _checksum(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
