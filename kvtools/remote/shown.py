"""How what stands for a remote file on this machine is told: by its URL."""

from __future__ import annotations

import re

_roots: list[tuple[str, re.Pattern[str]]] = []


def show_root(root: str) -> None:
    """Take notice of the folder under which remote places lie: ROOT/s3/bucket/name is s3://bucket/name."""
    _roots.append((root, re.compile(re.escape(root) + r"/([a-z0-9]+)(?:/|(?=['\"\s]|$))")))


def shown(text: str) -> str:
    """Return a text with URLs in place of the local paths that stand for them.

    >>> shown("reading 'model.ckpt.index': no such file")
    "reading 'model.ckpt.index': no such file"
    """
    for root, place in _roots:
        if root in text:
            text = place.sub(r"\1://", text)
    return text
