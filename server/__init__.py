"""kvtools.server."""
