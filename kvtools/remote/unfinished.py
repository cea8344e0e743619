"""What stands in a folder of a store while it is being written."""

from __future__ import annotations

UNFINISHED = ".kvtools-unfinished"
"""A file in a folder that is being written, or whose writing was broken off; no such folder is opened."""
