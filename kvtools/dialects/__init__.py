"""The checkpoint formats that kvtools opens and writes, one file per format.

chunk.py          rows as NumPy columns
schema.py         what a table is: names, types and shapes
options.py        how a checkpoint is to be opened
interface.py      what every dialect gives: tables to be read, and the checkpoint that has them
writing.py        what every writer takes
dialect.py        what a dialect is: its name, how to tell it, what it can hold
detect.py         which dialect a path is in
location.py       from what a user typed to the TensorFlow checkpoint that is meant
bundle/           the TensorFlow bundle, the container of most of them
column.py         a column: a tensor of a bundle, or a run of a raw file
column_table.py   tables made of columns
bundle_output.py  writing tables as tensors of a bundle
tfplugin.py       our own layout
savedmodel.py     a SavedModel that `kvtools export` wrote
tensorflow.py     any other TensorFlow checkpoint: dense variables only
"""
