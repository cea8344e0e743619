"""The forms in which keys go to a server and rows come back, as bytes; without a client library."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from serving.tables import NAME, redis_key

from kvtools.lookup_frame import MEDIA_TYPE, TableKeys, decode_answer, encode_request

OCTETS = "application/octet-stream"
JSON = "application/json"
INFER_HEADER = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Form:
    """`body` makes a request's from keys int64 [n]; `rows` reads float32 [n, dim] from an answer's body.

    Of a Redis protocol the body is the whole request, and its answer has `replies(n)` replies.
    """

    name: str
    port: Literal["http", "resp", "redis"]
    body: Callable[[np.ndarray], bytes]
    rows: Callable[[bytes, int], np.ndarray]
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    replies: Callable[[int], int] = lambda _: 1

    @property
    def protocol(self) -> str:
        """What load.cc calls the form of answers."""
        return "http" if self.port == "http" else "resp"

    def all_headers(self, body: bytes) -> dict[str, str]:
        """The headers of a request."""
        if INFER_HEADER in self.headers:
            return {**self.headers, INFER_HEADER: str(body.index(b"\n") + 1)}
        return self.headers

    def request(self, keys: np.ndarray) -> bytes:
        """A request as it goes over the wire."""
        body = self.body(keys)
        if self.port != "http":
            return body
        fields = "".join(f"{name}: {value}\r\n" for name, value in self.all_headers(body).items())
        head = f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body


def resp_command(*words: bytes) -> bytes:
    """A command in Redis' protocol."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def mget(keys: np.ndarray) -> bytes:
    """All keys in one command."""
    return resp_command(b"MGET", *map(redis_key, keys.tolist()))


def gets(keys: np.ndarray) -> bytes:
    """A command for each key, without waiting."""
    return b"".join(resp_command(b"GET", redis_key(key)) for key in keys.tolist())


def resp_rows(answer: bytes, dim: int) -> np.ndarray:
    """The rows of strings of 4 x dim bytes each."""
    head = b"$%d\r\n" % (4 * dim)
    at = answer.index(head)
    record = np.dtype([("head", f"V{len(head)}"), ("row", np.float32, dim), ("end", "V2")])
    return np.frombuffer(answer[at:], record)["row"]


def infer_body(keys: np.ndarray) -> bytes:
    """KServe v2 with the binary extension; ends its JSON in a line feed, so that its length is found."""
    given = {"name": "ids", "shape": [len(keys)], "datatype": "INT64", "parameters": {"binary_data_size": keys.nbytes}}
    wanted = {"name": "embeddings", "parameters": {"binary_data": True}}
    return json.dumps({"inputs": [given], "outputs": [wanted]}).encode() + b"\n" + keys.tobytes()


def infer_rows(answer: bytes, dim: int) -> np.ndarray:
    """The rows are the end of the answer, behind the JSON that says how many there are."""
    document, _ = json.JSONDecoder().raw_decode(answer[:1000].decode("latin-1"))
    (output,) = document["outputs"]
    size = output["parameters"]["binary_data_size"]
    return np.frombuffer(answer[len(answer) - size :], np.float32).reshape(-1, dim)


def _floats(answer: bytes, dim: int) -> np.ndarray:
    return np.frombuffer(answer, np.float32).reshape(-1, dim)


def _json_rows(name: str) -> Callable[[bytes, int], np.ndarray]:
    return lambda answer, _: np.array(json.loads(answer)[name], np.float32)


def _compact(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


_LOOKUP = f"/v1/tables/{NAME}:lookup"
_PREDICT = "/v1/models/default:predict"
_ROWS_ALONE = {"output_filter": ["embeddings"]}

BINARY = Form(
    "HTTP, binary",
    "http",
    lambda keys: keys.tobytes(),
    _floats,
    _LOOKUP,
    {"Content-Type": OCTETS, "Accept": OCTETS},
)
FRAME = Form(
    "HTTP, frame",
    "http",
    lambda keys: encode_request([TableKeys(NAME, keys)]),
    lambda answer, _: decode_answer(answer)[0][0].embeddings,
    "/v1/tables:lookup",
    {"Content-Type": MEDIA_TYPE, "Accept": MEDIA_TYPE},
)
LOOKUP_JSON = Form(
    "HTTP, JSON",
    "http",
    lambda keys: _compact({"keys": keys.tolist()}),
    _json_rows("embeddings"),
    _LOOKUP,
    {"Content-Type": JSON},
)
PREDICT_ROWS = Form(
    "TF Serving REST, rows",
    "http",
    lambda keys: _compact({"signature_name": NAME, "instances": keys.tolist(), **_ROWS_ALONE}),
    _json_rows("predictions"),
    _PREDICT,
    {"Content-Type": JSON},
)
PREDICT_COLUMNS = Form(
    "TF Serving REST, columns",
    "http",
    lambda keys: _compact({"signature_name": NAME, "inputs": keys.tolist(), **_ROWS_ALONE}),
    _json_rows("outputs"),
    _PREDICT,
    {"Content-Type": JSON},
)
INFER = Form(
    "KServe v2 REST, binary",
    "http",
    infer_body,
    infer_rows,
    f"/v2/models/{NAME}/infer",
    {"Content-Type": OCTETS, INFER_HEADER: ""},
)
RESP_MGET = Form("RESP, MGET", "resp", mget, resp_rows)
RESP_GETS = Form("RESP, GETs in a pipeline", "resp", gets, resp_rows, replies=lambda keys: keys)
REDIS_MGET = Form("Redis MGET", "redis", mget, resp_rows)
REDIS_GETS = Form("Redis, GETs in a pipeline", "redis", gets, resp_rows, replies=lambda keys: keys)

FORMS = (
    REDIS_MGET,
    BINARY,
    RESP_MGET,
    FRAME,
    LOOKUP_JSON,
    PREDICT_ROWS,
    PREDICT_COLUMNS,
    INFER,
    REDIS_GETS,
    RESP_GETS,
)
