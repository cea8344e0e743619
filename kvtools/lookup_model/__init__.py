"""A SavedModel that looks up rows of tables, as the messages that TensorFlow reads; made without TensorFlow.

messages.py    how the messages are encoded
structures.py  how functions are called, and what they take and give
signatures.py  what a signature takes and gives, and the function that looks its tables up
graph.py       what a session runs: tables, signatures, initialization, saving and restoring
objects.py     what `tf.saved_model.load` builds: objects by name, their functions and variables
model.py       all of it as `saved_model.pb`, and the object graph of the variables' checkpoint

What a table is in a graph, its resources, its index and the reading of its rows, is in `kvtools.stock_model`.

`tf.saved_model.save` makes the same of a `tf.Module` per table; it takes 60 ms for each, most of it
to trace five functions, which here are written down. Formats: saved_model.proto, meta_graph.proto, graph.proto,
function.proto and saved_object_graph.proto in https://github.com/tensorflow/tensorflow/tree/master/tensorflow/core
"""
