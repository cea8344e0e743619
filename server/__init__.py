"""Embedding lookups over HTTP and gRPC, from a read-only store over a checkpoint or a SavedModel.

settings.py         everything that the server can be told
store.py            the tables, those of a mapped snapshot
snapshot_cache.py   snapshots of what is no snapshot, made once
catalog.py          what is served now: models, versions, labels
request.py          from bytes to keys, and what can be wrong with them
codecs.py           from rows to bytes
answer.py           the one core: parse, look up, encode
lookups.py          the core as a service: on which thread, and an answer whatever happens
observer.py         who watches lookups, and who guards them
telemetry.py        the observer of a server that runs: keys asked, answers counted and logged
tables_api.py       our own interface, on FastAPI
http_protocol.py    HTTP, with a short way for lookups

The protocols of others, over the same catalog:

signatures.py          what a model can be asked, the same for all of them
saved_models.py        whole models, run by TensorFlow
split_store.py         models in two halves: rows, and a dense part that TensorFlow runs
tensorflow_rest.py     TensorFlow Serving's REST; its gRPC is in tensorflow_grpc.py
kserve_rest.py         the Open Inference Protocol over HTTP; its gRPC is in kserve_grpc.py
inference_protocol.py  what these two have in common
grpc_server.py         the gRPC port
protos.py              the messages of gRPC, in a pool of their own
protocol_routes.py     their routes, protocol_error.py their errors, request_body.py what they are sent
json_tensor.py         tensors as JSON; tensor_proto.py: as TensorFlow's message
model_status.py        the states of versions

access_keys.py      who may ask; guard.py: asked of every request but lookups, which ask themselves
metrics.py          counts of all workers, for Prometheus
access_log.py       a line for each request
request_ids.py      an id for each
tls.py              the certificate of all ports
documentation.py    /docs, from files of this machine
page_api.py         the page at /, and what it asks; its files are in page/

health.py           live, ready, warm
admin.py            labels and looking for versions, by requests
app.py              the FastAPI application, of all interfaces
late_app.py         the same, made once the server listens
version_folder.py   which versions lie on disk
version_policy.py   which of them to serve
versions.py         the life of a version: found, loaded, served, let go
sources.py          where models come from; what workers tell each other
recent_keys.py      keys asked for lately
process.py          one process: loads, listens, drains
workers.py          several, and their supervisor
terminal.py         whether there is one
run.py              one process, or several
"""
