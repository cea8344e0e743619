"""Steps that all ranks take alike: they clip by norms of the rows of all ranks, and all skip a step or none.

Of a table that is spread over ranks each has the gradient of its own rows. What an optimizer makes of all gradients
together, a norm or whether they are finite, would differ between the ranks, and dense variables with it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfplugin import ranks
from tfplugin.optimizers import generic_update
from tfplugin.optimizers.fused import compute_dtype
from tfplugin.optimizers.inner_optimizer import inner_of, innermost
from tfplugin.optimizers.patch_lock import patch_lock
from tfplugin.wrapped_method import replaced

Pairs = Sequence[tuple[Any, Any]]

#: Optimizers that take norms or factors over all rows of a dense variable. (Of a table Lamb takes those of each row.)
_SEES_A_WHOLE = (*generic_update.COUPLES_ROWS, "Lamb")


def spread_variables(grads_and_vars: Pairs) -> list[Any]:
    """Those of which each rank has some rows: each once, in the order in which all ranks give them."""
    found = {id(v): v for _, v in grads_and_vars if getattr(v, "ranks", 1) > 1}
    return list(found.values())


@contextlib.contextmanager
def agreed_step(optimizer: Any, spread: Sequence[Any], stand_ins: Sequence[Any], pairs: Pairs) -> Iterator[None]:
    """While `optimizer` applies the gradients of `pairs` it agrees with those of the other ranks.

    That is an exchange of some numbers where it clips by a norm, and one where it scales the loss.

    Args:
      optimizer: with what is around it.
      spread: see `spread_variables`.
      stand_ins: what stands for each of these in `pairs`; it need not be there, as without a gradient.
      pairs: gradients and variables as the optimizer gets them.

    Raises:
      ValueError: it has ``gradient_transformers``, or takes norms over all rows of a variable that is spread.
    """
    core = innermost(optimizer)
    if getattr(core, "gradient_transformers", None):
        raise ValueError(
            f"{type(core).__name__}: gradient_transformers would see the rows of this rank only of "
            f"'{spread[0].name}', which is spread over {spread[0].ranks} ranks. Clip with clipnorm=, global_clipnorm= "
            "or clipvalue=, which are those of one rank; or change the gradients before apply_gradients."
        )
    shared = [v for v in spread if getattr(v, "_is_shard", False) and v.owner is None]
    if shared and generic_update.couples_rows(core, _SEES_A_WHOLE):
        raise ValueError(
            f"{type(core).__name__} takes norms or factors over all rows of a variable, and each of {shared[0].ranks} "
            f"ranks would take those of its own rows of '{shared[0].name}'. Take another optimizer, such as Adam or "
            "AdamW; or make the variable with mode='localized:0', which has it on one rank."
        )
    group = _Agreement(spread, {id(v): n for n, v in enumerate(stand_ins)}, pairs)
    with patch_lock(core), contextlib.ExitStack() as patches:
        if hasattr(core, "_create_all_weights"):  # tf_keras.optimizers.legacy
            if core.clipnorm is not None:
                patches.enter_context(_instead(core, "_clipnorm_fn", group.clip_pairs(core.clipnorm)))
            if core.global_clipnorm is not None:
                patches.enter_context(
                    _instead(core, "_global_clipnorm_fn", group.clip_pairs_together(core.global_clipnorm))
                )
        elif getattr(core, "clipnorm", None):
            patches.enter_context(_instead(core, "_clip_gradients", group.clip(core.clipnorm)))
        elif getattr(core, "global_clipnorm", None):
            patches.enter_context(_instead(core, "_clip_gradients", group.clip_together(core.global_clipnorm)))
        while optimizer is not None:
            if hasattr(optimizer, "check_finite"):  # the LossScaleOptimizer of Keras 3
                patches.enter_context(_instead(optimizer, "check_finite", group.told_of_all))
            elif hasattr(getattr(optimizer, "_loss_scale", None), "update"):  # of tf_keras and tf.compat.v1
                patches.enter_context(_instead(optimizer._loss_scale, "update", group.told_of_all))
            optimizer = inner_of(optimizer)
        yield


def _instead(owner: Any, method: str, ours: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Has `ours`, a function of the method and its arguments, in the place of a method of an object."""
    return replaced(owner, method, functools.partial(ours, getattr(owner, method)))


class _Agreement:
    """What ranks tell each other in one step.

    Args:
      spread: the variables that they share.
      place_of: which of them, by the id of what stands for it.
      pairs: the step's.
    """

    def __init__(self, spread: Sequence[Any], place_of: dict[int, int], pairs: Pairs) -> None:
        self._name = [spread[0].name]
        self._count = len(spread)
        self._place_of = place_of
        # As Keras filters them before it clips.
        self._clipped = [
            v for gradient, v in pairs if gradient is not None and not getattr(v, "overwrite_with_gradient", False)
        ]

    # ---- Clipping ----------------------------------------------------------------------------------------------------

    def clip(self, most: float) -> Callable[..., Any]:
        """For ``_clip_gradients`` with a `clipnorm`."""
        return lambda stock, gradients: self._each(gradients, self._variables(gradients), most, stock(gradients))

    def clip_together(self, most: float) -> Callable[..., Any]:
        """For ``_clip_gradients`` with a `global_clipnorm`."""
        return lambda stock, gradients: self._together(gradients, self._variables(gradients), most)

    def clip_pairs(self, most: float) -> Callable[..., Any]:
        """As `clip`, of pairs."""

        def clip(stock: Any, pairs: Pairs) -> Pairs:
            gradients, variables = zip(*pairs, strict=True)
            done = self._each(gradients, variables, most, [gradient for gradient, _ in stock(pairs)])
            return list(zip(done, variables, strict=True))

        return clip

    def clip_pairs_together(self, most: float) -> Callable[..., Any]:
        """As `clip_together`, of pairs."""

        def clip(stock: Any, pairs: Pairs) -> Pairs:
            gradients, variables = zip(*pairs, strict=True)
            return list(zip(self._together(gradients, variables, most), variables, strict=True))

        return clip

    def _variables(self, gradients: Sequence[Any]) -> Sequence[Any]:
        if len(gradients) != len(self._clipped):
            raise RuntimeError(f"an optimizer clips {len(gradients)} gradients of {len(self._clipped)} variables")
        return self._clipped

    def _each(self, gradients: Sequence[Any], variables: Sequence[Any], most: float, alone: Sequence[Any]) -> list[Any]:
        """Clipped gradients; `alone` are those clipped by their norms on this rank."""
        squares = [tf.constant(0.0, tf.float64)] * self._count
        places = [self._place_of.get(id(v)) for v in variables]
        for gradient, place in zip(gradients, places, strict=True):
            if place is not None:
                squares[place] = _square(gradient)
        norms = tf.sqrt(tf.reduce_sum(self._of_all(tf.stack(squares), "norms"), 0))
        return [
            clipped if place is None else _scaled(gradient, most / tf.maximum(norms[place], most))
            for gradient, place, clipped in zip(gradients, places, alone, strict=True)
        ]

    def _together(self, gradients: Sequence[Any], variables: Sequence[Any], most: float) -> list[Any]:
        # Dense variables count once: rank 0 tells of them, so that all have the very same number.
        counted = [
            _square(gradient)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None and (id(variable) in self._place_of or ranks.rank() == 0)
        ]
        mine = tf.reshape(tf.add_n([tf.constant(0.0, tf.float64), *counted]), [1])
        norm = tf.sqrt(tf.reduce_sum(self._of_all(mine, "norms")))
        # Infinite or no number: so are the gradients, as TensorFlow has it.
        factor = most / tf.maximum(norm, most) + (norm - norm)
        return [None if gradient is None else _scaled(gradient, factor) for gradient in gradients]

    # ---- Loss scaling ------------------------------------------------------------------------------------------------

    def told_of_all(self, stock: Any, gradients: Sequence[Any]) -> Any:
        """`stock`, which asks whether gradients are finite, with one more that is infinite where any rank's is."""
        finite = [tf.reduce_all(tf.math.is_finite(_values(one))) for one in gradients if one is not None]
        mine = tf.reshape(tf.cast(tf.reduce_all(tf.stack([tf.constant(True), *finite])), tf.float64), [1])
        all_are = tf.reduce_all(self._of_all(mine, "finite") > 0)
        return stock([*gradients, tf.where(all_are, 0.0, float("inf"))])

    def _of_all(self, mine: tf.Tensor, what: str) -> tf.Tensor:
        return ranks.numbers_of_all(mine, ranks.exchange_name(what, self._name))


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)


def _square(gradient: Any) -> tf.Tensor:
    values = _values(gradient)
    values = tf.cast(values, compute_dtype(values.dtype))
    return tf.cast(tf.reduce_sum(tf.square(values)), tf.float64)


def _scaled(gradient: Any, factor: tf.Tensor) -> Any:
    values = _values(gradient)
    wide = compute_dtype(values.dtype)
    values = tf.cast(tf.cast(values, wide) * tf.cast(factor, wide), values.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values
