"""Checkpoints in a chain: whole ones and increments, written beside training. See docs/chain.md."""
