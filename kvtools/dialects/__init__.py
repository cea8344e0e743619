"""The checkpoint formats that kvtools opens, one file per format.

interface.py     what every dialect gives: a schema per table and a stream of row chunks
location.py      from what a user typed to the files that are meant
detect.py        which dialect a path is in
bundle/          the TensorFlow bundle, the container of most of them
bundle_table.py  a table whose columns are tensors of a bundle
tfplugin.py      our own layout
savedmodel.py    a SavedModel that `kvtools export` wrote
tensorflow.py    any other TensorFlow checkpoint: dense variables only
"""
