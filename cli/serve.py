"""`kvtools serve`: embedding lookups over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtools.cli.options import Source, SourcePath
from kvtools.errors import UsageError


def run(
    path: SourcePath,
    *,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 picks a free one.")] = 8501,
    max_keys: Annotated[int, typer.Option(help="The most keys that one request may ask for.")] = 65536,
    source: Source,
) -> None:
    """Answer embedding lookups over HTTP, from a checkpoint of any dialect or an exported SavedModel.

    The rows stay in the files, memory-mapped; only an index of the keys is built in memory.

    \b
    Examples:
      kvtools serve exported
      kvtools serve model.ckpt-100 --host 0.0.0.0 --port 8080 --max-keys 10000
      curl -d '{"keys": [17, -3]}' http://127.0.0.1:8501/v1/tables/user_emb:lookup
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"serving '{path}': got --port {port}, expected 0 to 65535")
    if max_keys < 1:
        raise UsageError(f"serving '{path}': got --max-keys {max_keys}, expected 1 or more")
    from kvtools.server.run import serve
    from kvtools.server.settings import Settings

    serve(path, source.options(), Settings(host=host, port=port, max_keys=max_keys))
