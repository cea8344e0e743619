"""The functions of one table: look ids up, and make, fill and give up the index from keys to rows."""

from __future__ import annotations

from dataclasses import dataclass

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.lookup_model.messages import (
    INT32,
    INT64,
    RESOURCE,
    UNKNOWN_RANK,
    Argument,
    constant,
    function,
    node,
    of_bool,
    of_number,
    of_text,
    of_type,
    shape,
)

KEYS_SHAPE = shape(-1)
_ANSWERED_WIDER = frozenset({"float16", "bfloat16", "int8", "bool"})
_NOTHING = 1
"""What functions return that have nothing to return: TensorFlow's resources do so."""


def legal(name: str) -> str:
    """Return a name that a node may have: none may begin with `_`.

    >>> legal("user_emb"), legal("_emb")
    ('user_emb', '._emb')
    """
    return f".{name}" if name.startswith("_") else name


@dataclass(frozen=True)
class Lookup:
    """A table in a model.

    `shared_name` tells which index of a process is this table's: two models must never share one.
    """

    number: int
    signature: str
    value_dtype: str
    dim: int
    shared_name: str

    @property
    def dtype(self) -> int:
        """The type of the values, as stored."""
        return number_named(self.value_dtype)

    @property
    def answer_dtype(self) -> int:
        """The type of the answers: float32 where values are narrower than that."""
        return number_named("float32") if self.value_dtype in _ANSWERED_WIDER else self.dtype

    @property
    def values_shape(self) -> bytes:
        """The shape of the values' variable."""
        return shape(-1, self.dim)

    def variable(self, name: str) -> str:
        """Return the name of the variable `keys` or `values`."""
        return f"{legal(self.signature)}/{name}"

    def tensor(self, variable: str) -> str:
        """Return what the variable `keys` or `values` is called in the bundle of variables."""
        return f"tables/{self.number}/{variable}/.ATTRIBUTES/VARIABLE_VALUE"

    def function(self, does: str) -> str:
        """Return what the function that does this is called: `lookup`, or what `INDEX_FUNCTIONS` has."""
        return f"__inference_{does}_{self.number}"


INDEX_FUNCTIONS = {"_create_resource": "_creator", "_initialize": "_initializer", "_destroy_resource": "_destroyer"}
"""What a resource of TensorFlow calls its functions -> what these are called in the library."""


def index_node(name: str, lookup: Lookup) -> bytes:
    """Encode the node that is the index."""
    return node(
        name,
        "HashTableV2",
        container=of_text(""),
        shared_name=of_text(lookup.shared_name),
        use_node_name_sharing=of_bool(False),
        key_dtype=of_type(INT64),
        value_dtype=of_type(INT64),
    )


def lookup_function(lookup: Lookup, name: str, missing: int) -> bytes:
    """Encode ids -> rows of values; the row `missing` for ids that are no keys."""
    found, answer = "Gather:output:0", "Gather:output:0"
    nodes = [
        constant("missing", INT64, missing),
        node(
            "LookupTableFindV2",
            "LookupTableFindV2",
            ["index", "ids", "missing:output:0"],
            Tin=of_type(INT64),
            Tout=of_type(INT64),
        ),
        node(
            "Gather",
            "ResourceGather",
            ["values", "LookupTableFindV2:values:0"],
            batch_dims=of_number(0),
            validate_indices=of_bool(True),
            dtype=of_type(lookup.dtype),
            Tindices=of_type(INT64),
        ),
    ]
    if lookup.answer_dtype != lookup.dtype:
        answer = "Cast:y:0"
        nodes.append(
            node(
                "Cast",
                "Cast",
                [found],
                SrcT=of_type(lookup.dtype),
                DstT=of_type(lookup.answer_dtype),
                Truncate=of_bool(False),
            )
        )
    stateful = ["Gather", "LookupTableFindV2"]
    arguments = [
        Argument("ids", INT64, "ids", UNKNOWN_RANK),
        Argument("index", RESOURCE, "table_handle"),
        Argument("values", RESOURCE, "resource", variable=(lookup.dtype, lookup.values_shape)),
    ]
    return _answering(name, arguments, lookup.answer_dtype, answer, nodes, stateful)


def creator_function(lookup: Lookup) -> bytes:
    """Encode the function that makes the index."""
    nodes = [index_node("HashTableV2", lookup)]
    name = lookup.function("_creator")
    return _answering(name, [], RESOURCE, "HashTableV2:table_handle:0", nodes, ["HashTableV2"])


def initializer_function(lookup: Lookup) -> bytes:
    """Encode the function that fills the index: the number of each key's row, by the variable `keys`."""
    nodes = [
        node("ReadVariableOp", "ReadVariableOp", ["keys"], dtype=of_type(INT64)),
        node("Size", "Size", ["ReadVariableOp:value:0"], T=of_type(INT64), out_type=of_type(INT64)),
        constant("start", INT64, 0),
        constant("delta", INT64, 1),
        node("rows", "Range", ["start:output:0", "Size:output:0", "delta:output:0"], Tidx=of_type(INT64)),
        node(
            "InitializeTableV2",
            "InitializeTableV2",
            ["index", "ReadVariableOp:value:0", "rows:output:0"],
            Tkey=of_type(INT64),
            Tval=of_type(INT64),
        ),
        constant("nothing", INT32, _NOTHING),
    ]
    arguments = [
        Argument("keys", RESOURCE, "resource", variable=(INT64, KEYS_SHAPE)),
        Argument("index", RESOURCE, "table_handle"),
    ]
    stateful = ["InitializeTableV2", "ReadVariableOp"]
    return _answering(lookup.function("_initializer"), arguments, INT32, "nothing:output:0", nodes, stateful)


def destroyer_function(lookup: Lookup) -> bytes:
    """Encode the function that gives the index up: nothing is to be done."""
    nodes = [constant("nothing", INT32, _NOTHING)]
    return _answering(lookup.function("_destroyer"), [], INT32, "nothing:output:0", nodes, [])


def _answering(
    name: str, arguments: list[Argument], dtype: int, answer: str, nodes: list[bytes], stateful: list[str]
) -> bytes:
    """Encode a function whose answer comes after all that it does."""
    if stateful:
        nodes.append(node("done", "NoOp", [f"^{each}" for each in stateful]))
    nodes.append(node("Identity", "Identity", [answer, *(["^done"] if stateful else [])], T=of_type(dtype)))
    return function(name, arguments, dtype, "Identity:output:0", nodes, stateful)
