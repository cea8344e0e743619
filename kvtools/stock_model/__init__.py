"""A trained SavedModel with the operations of key-value engines, rewritten into one of stock TensorFlow operations.

TensorFlow is not needed: the messages of a SavedModel are read and written here.

fields.py       the fields of a message, kept as they are
attributes.py   attributes of nodes: read, and lists changed
graph_def.py    nodes, functions and graphs
meta_graph.py   a SavedModel's graph with its signatures, collections and saver
function_body.py  a function of stock operations, made step by step
table.py        a table in the model: what it holds, and its resources
table_nodes.py, table_objects.py   what a table is in a graph, and among the objects
index.py        the index from keys to rows, of whatever kind
hash_index.py, perfect_index.py   that of a `StaticHashTable`, and that of a perfect hash
rows.py         the reading of rows
stored_rows.py  rows as they lie in a variable, and as numbers
initial_rows.py what a key that is not there begins with
plain_ops.py, pooled_ops.py, exchange_ops.py   what each operation of ours becomes
tfra_ops.py, tfplus_ops.py, deeprec_ops.py     and each of another engine
op_table.py     all of them by name
handles.py      which table a handle is
rewrite.py      graphs and functions, changed
given_rows.py   lookups in tables that are not in the model
cut_functions.py, cut_model.py   functions, and a model, cut at these lookups
prune.py        what signatures need of a graph
training_graph.py  the graph of a TensorFlow 1 training session, made one to be served
objects.py      the objects of `tf.saved_model.load`, and of its checkpoint
stock_ops.py    the operations that stock TensorFlow has

Formats: saved_model.proto, meta_graph.proto, graph.proto, function.proto and saved_object_graph.proto in
https://github.com/tensorflow/tensorflow/tree/master/tensorflow/core
"""
