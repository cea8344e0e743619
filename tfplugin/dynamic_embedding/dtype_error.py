"""The error that reads and writes raise for keys and values of another dtype."""


class DtypeError(TypeError, ValueError):
    """A tensor of a dtype that the variable does not have.

    TensorFlow, which converts arguments for TFRA, has a `ValueError` for a tensor and a `TypeError` for numbers; a
    program may wait for either.
    """
