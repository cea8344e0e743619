"""`sok.init`."""

from __future__ import annotations

from tfplugin import ranks
from tfplugin.sok import horovod_refusals


def init(comm_tool: str = "horovod", use_legacy_optimizer: bool | None = None) -> None:
    """Finds out which rank this process is. Call it after ``hvd.init()``, on all ranks; calling it again is harmless.

    Ranks that are all on one machine share memory from then on, and lookups exchange through it, not over Horovod.
    Horovod's broadcasts of variables, and averages of gradients, are an error from then on where they get variables of
    sok, whose rows they would mix up.

    Without Horovod, in a process that was not started by ``horovodrun``, everything works as a single rank.

    Args:
      comm_tool: ``"horovod"``; ``"single"``: this process is the only one, and Horovod is not asked.
      use_legacy_optimizer: accepted for code written for SparseOperationKit, which replaces ``tf.keras.optimizers``
        where it is True. Nothing is replaced here, and every Keras optimizer works.

    Raises:
      ValueError: another comm_tool; ``"single"`` in one of several processes that ``horovodrun`` started.
      RuntimeError: ``hvd.init()`` has not been called, or the process was started by ``horovodrun`` and Horovod is not
        installed.

    Example:
      >>> import horovod.tensorflow as hvd
      >>> hvd.init()
      >>> sok.init()
    """
    del use_legacy_optimizer
    if comm_tool not in ("horovod", "single"):
        raise ValueError(f"sok.init: comm_tool must be 'horovod' or 'single', got {comm_tool!r}.")
    if comm_tool == "single":
        if ranks.launched_ranks() > 1:
            raise ValueError(
                f"sok.init: comm_tool='single' is for one process, and this is one of {ranks.launched_ranks()} that "
                "horovodrun started: each would train a model of its own. Use comm_tool='horovod'."
            )
        ranks.keep(ranks.SingleRank())
        return
    try:
        ranks.find().connect()
    except RuntimeError as error:
        raise RuntimeError(f"sok.init: {error}") from error
    horovod_refusals.install()
