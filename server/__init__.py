"""Embedding lookups over HTTP, from a read-only store over a checkpoint or an exported SavedModel.

store.py            the tables, those of a mapped snapshot
snapshot_cache.py   snapshots of what is no snapshot, made once
app.py              the FastAPI application
run.py              uvicorn around it
"""
