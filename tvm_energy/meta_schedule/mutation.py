"""Mutation of candidates, which waits until there are kernels to start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule import TuneContext, _ffi_api
from tvm.s_tir.meta_schedule.mutator import PyMutator
from tvm.s_tir.meta_schedule.space_generator import PostOrderApply


@derived_object
class WaitingMutator(PyMutator):
    """A mutator that changes nothing before a task's first kernels are known.

    Until then each candidate is a random sample, and its score is random too. Mutating them only yields
    other random samples, and took more than half of the search's time. Afterwards the known kernels are
    among the parents, so that even under random scores a part of the candidates lies near the best of them.

    Args:
        mutator: the mutator to which traces go afterwards.
        known: whether kernels of the task are known.
    """

    def __init__(self, mutator: Any, known: Callable[[], bool]) -> None:
        super().__init__()
        self.mutator = mutator
        self.known = known

    def _initialize_with_tune_context(self, context: Any) -> None:
        self.mutator._initialize_with_tune_context(context)

    def apply(self, trace: Any, seed: int) -> Any:
        """The mutated trace; None before kernels are known, which leaves the parent as it is."""
        return _ffi_api.MutatorApply(self.mutator, trace, seed) if self.known() else None

    def clone(self) -> WaitingMutator:
        """A mutator with a copy of the one inside."""
        return WaitingMutator(self.mutator.clone(), self.known)


def waiting_space(mod: Any, target: Any, known: Callable[[], bool]) -> PostOrderApply:
    """MetaSchedule's default design space of a target, with mutators that wait for ``known``."""
    stock = TuneContext(mod=mod, target=target, space_generator="post-order-apply").space_generator
    return PostOrderApply(
        sch_rules=stock.sch_rules,
        postprocs=stock.postprocs,
        mutator_probs={
            WaitingMutator(mutator, known): float(probability)
            for mutator, probability in stock.mutator_probs.items()
        },
    )
