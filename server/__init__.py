"""Embedding lookups over HTTP, from a read-only store over a checkpoint or an exported SavedModel.

settings.py    everything that the server can be told
key_index.py   from keys to row numbers
store.py       the tables, memory-mapped
catalog.py     what is served now: models, versions, labels
tables_api.py  our own interface
health.py      live, ready, warm
app.py         the FastAPI application, of all interfaces
run.py         uvicorn around it
"""
