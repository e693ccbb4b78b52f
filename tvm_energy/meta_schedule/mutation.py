"""Mutation of candidates, which waits until predictions lead the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule import TuneContext, _ffi_api
from tvm.s_tir.meta_schedule.mutator import PyMutator
from tvm.s_tir.meta_schedule.space_generator import PostOrderApply


@derived_object
class LedMutator(PyMutator):
    """A mutator that changes nothing while the search is not led by predictions.

    The scores are random until enough kernels are known. Mutating random samples by random scores
    only yields other random samples, and took more than half of the search's time.

    Args:
        mutator: the mutator to which traces go once the search is led.
        led: whether the search is led.
    """

    def __init__(self, mutator: Any, led: Callable[[], bool]) -> None:
        super().__init__()
        self.mutator = mutator
        self.led = led

    def _initialize_with_tune_context(self, context: Any) -> None:
        self.mutator._initialize_with_tune_context(context)

    def apply(self, trace: Any, seed: int) -> Any:
        """The mutated trace; None while the search is not led, which leaves the parent as it is."""
        return _ffi_api.MutatorApply(self.mutator, trace, seed) if self.led() else None

    def clone(self) -> LedMutator:
        """A mutator with a copy of the one inside."""
        return LedMutator(self.mutator.clone(), self.led)


def led_space(mod: Any, target: Any, led: Callable[[], bool]) -> PostOrderApply:
    """MetaSchedule's default design space of a target, with mutators that wait for ``led``."""
    stock = TuneContext(mod=mod, target=target, space_generator="post-order-apply").space_generator
    return PostOrderApply(
        sch_rules=stock.sch_rules,
        postprocs=stock.postprocs,
        mutator_probs={
            LedMutator(mutator, led): float(probability)
            for mutator, probability in stock.mutator_probs.items()
        },
    )
