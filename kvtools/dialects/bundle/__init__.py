"""The TensorFlow bundle: the file format of checkpoints and of a SavedModel's variables, read and written
here.

    checksum.py      crc32c, masked
    wire.py          protocol-buffer wire format
    index_table.py   the `.index` file, a sorted string table
    records.py       what its entries say, and the keys of slices
    dtypes.py        TensorFlow's numbers for data types
    reader.py        tensors by name, memory-mapped
    writer.py        the other way round, streaming

Format:
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/util/tensor_bundle/tensor_bundle.h
"""

from kvtools.dialects.bundle.reader import Bundle, BundleTensor
from kvtools.dialects.bundle.writer import BundleWriter, Region, RegionWriter

__all__ = ["Bundle", "BundleTensor", "BundleWriter", "Region", "RegionWriter"]
