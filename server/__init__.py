"""Embedding lookups over HTTP, from a read-only store over a checkpoint or an exported SavedModel.

key_index.py   from keys to row numbers
store.py       the tables, memory-mapped
app.py         the FastAPI application
run.py         uvicorn around it
"""
