"""Embedding lookups over HTTP, from a read-only store over a checkpoint or an exported SavedModel.

settings.py         everything that the server can be told
store.py            the tables, those of a mapped snapshot
snapshot_cache.py   snapshots of what is no snapshot, made once
catalog.py          what is served now: models, versions, labels
request.py          from bytes to keys, and what can be wrong with them
codecs.py           from rows to bytes
answer.py           the one core: parse, look up, encode
lookups.py          the core as a service: on which thread, and an answer whatever happens
observer.py         who watches lookups, and who guards them
tables_api.py       our own interface, on FastAPI
http_protocol.py    HTTP, with a short way for lookups
health.py           live, ready, warm
app.py              the FastAPI application, of all interfaces
process.py          uvicorn around it
run.py              one process, or several
"""
