"""Mutation of candidates, which waits until there are more kernels than are made parents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule import TuneContext, _ffi_api
from tvm.s_tir.meta_schedule.mutator import PyMutator
from tvm.s_tir.meta_schedule.space_generator import PostOrderApply


@derived_object
class WaitingMutator(PyMutator):
    """A mutator that changes nothing until its search can select.

    Until then each candidate is a random sample, its score is random, and each known kernel is a parent
    (MetaSchedule takes the best 0.2 of its population). Mutating them only yields other random samples,
    and took more than half of the search's time.

    Args:
        mutator: the mutator to which traces go afterwards.
        ready: whether it is time.
    """

    def __init__(self, mutator: Any, ready: Callable[[], bool]) -> None:
        super().__init__()
        self.mutator = mutator
        self.ready = ready

    def _initialize_with_tune_context(self, context: Any) -> None:
        self.mutator._initialize_with_tune_context(context)

    def apply(self, trace: Any, seed: int) -> Any:
        """The mutated trace; None before it is time, which leaves the parent as it is."""
        return _ffi_api.MutatorApply(self.mutator, trace, seed) if self.ready() else None

    def clone(self) -> WaitingMutator:
        """A mutator with a copy of the one inside."""
        return WaitingMutator(self.mutator.clone(), self.ready)


def parent_count(strategy: Any) -> int | None:
    """How many known kernels a search strategy makes parents at most; None for one that does not breed."""
    if not hasattr(strategy, "init_measured_ratio"):
        return None
    return int(strategy.population_size * strategy.init_measured_ratio)


def waiting_space(mod: Any, target: Any, ready: Callable[[], bool]) -> PostOrderApply:
    """MetaSchedule's default design space of a target, with mutators that wait for ``ready``."""
    stock = TuneContext(mod=mod, target=target, space_generator="post-order-apply").space_generator
    return PostOrderApply(
        sch_rules=stock.sch_rules,
        postprocs=stock.postprocs,
        mutator_probs={
            WaitingMutator(mutator, ready): float(probability)
            for mutator, probability in stock.mutator_probs.items()
        },
    )
