"""kvtools.cli."""
