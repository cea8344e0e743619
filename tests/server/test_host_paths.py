"""Messages for clients, from which the paths of the host are taken out."""

from __future__ import annotations

import pytest

from kvtools.server.host_paths import without_folders


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("reading '/srv/my models/ctr/7': empty", "reading '7': empty"),
        ("reading 'models/ctr/7.kvsnap': cut", "reading '7.kvsnap': cut"),
        ("not a valid checkpoint: /srv/sm/5/variables/variables", "not a valid checkpoint: variables"),
        ("NOT_FOUND: /srv/sm/5/x.so; no such file", "NOT_FOUND: x.so; no such file"),
        ("not a valid checkpoint: sm/5/variables/variables", "not a valid checkpoint: 5/variables/variables"),
        ("table '/ads/x/emb' and table 'sm/emb' differ", "table '/ads/x/emb' and table 'sm/emb' differ"),
        ("connecting to 'redis://cache:6379/0': refused", "connecting to 'redis://cache:6379/0': refused"),
        ("connecting to 'unix:///run/redis.sock': refused", "connecting to 'redis.sock': refused"),
        ("no table 'x'; GET /v1/tables lists them", "no table 'x'; GET /v1/tables lists them"),
        ("int32 -> float32[3], 1/2/3 of it", "int32 -> float32[3], 1/2/3 of it"),
    ],
)
def test_folders_are_taken_out_and_names_stay(message: str, shown: str) -> None:
    assert without_folders(message, "sm/5") == shown
