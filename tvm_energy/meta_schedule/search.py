"""The search: TVM's design spaces and mutators, candidates that can run, and none of them forgotten.

MetaSchedule's evolutionary search begins every round with a new population. On a GPU 90 to 100 % of its random
traces turn out not to be runnable after they have been applied and lowered, and what it does not choose it
drops. Here

* tile sizes are drawn among those that can run (`tilings`), so that nearly every trace that is applied is valid;
* a candidate that has once been drawn and described by its features stays, and is judged again each round by
  what the model has learned since: the choice is among all that were ever seen;
* parents are the fastest kernels and the best predicted ones.

Design spaces, mutators and postprocessors are TVM's own; the search is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate, PySearchStrategy
from tvm.s_tir.schedule import Schedule
from tvm.s_tir.schedule.trace import Trace
from tvm_ffi import structural_hash

from tvm_energy.errors import ConfigurationError
from tvm_energy.meta_schedule.cost_model import FeatureReader
from tvm_energy.meta_schedule.tilings import Tilings
from tvm_energy.meta_schedule.traces import workload_hash
from tvm_energy.session import Session

#: Part of a batch that is chosen at random, as in MetaSchedule.
_EPS_GREEDY = 0.05

#: Candidates that are remembered, the best by their scores.
_HELD = 4096

#: How often a draw, or a mutation, is tried again.
_TRIES = 10


def default_population(per_round: int) -> int:
    """New candidates that the search looks at in rounds of that many trials.

    MetaSchedule's population of 512 is 8 for each of its 64 trials a round. Smaller rounds keep that ratio, which
    makes the search shorter with them; 64 at least, so that there is something to choose from.
    """
    return min(512, max(64, 8 * per_round))


def check_population(population: int) -> None:
    """Refuse a population without candidates.

    Raises:
        ConfigurationError: it is not positive.
    """
    if population < 1:
        raise ConfigurationError(f"population must be at least 1, got {population}")


@derived_object
class ReservoirSearch(PySearchStrategy):
    """Draws valid candidates, remembers them, and lets the session choose among all; see the module's text.

    Until predictions lead (`Session.leads`) a batch is drawn at random.

    Args:
        session: knows what has run, and scores the rest.
        population: new candidates a round once predictions lead: half of them drawn, half mutations; None for
            `default_population`.

    Raises:
        ConfigurationError: the population is not positive.
    """

    def __init__(self, session: Session, population: int | None = None) -> None:
        super().__init__()
        if population is not None:
            check_population(population)
        self.session = session
        self.population = population
        self._context: Any = None
        self._reservoir: _Reservoir | None = None
        self._left = 0
        self._per_round = 0

    def _initialize_with_tune_context(self, context: Any) -> None:
        self._context = context

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: Sequence[Any],
        database: Any = None,
        cost_model: Any = None,
    ) -> None:
        """See ``SearchStrategy.pre_tuning``; scores come from the session, whose cost model this is."""
        self._left, self._per_round = int(max_trials), int(num_trials_per_iter)
        self._reservoir = _Reservoir(self.session, self._context, design_spaces, database)

    def post_tuning(self) -> None:
        """See ``SearchStrategy.post_tuning``."""
        if self._reservoir is not None:
            self._reservoir.close()
        self._reservoir = None

    def generate_measure_candidates(self) -> list[Any] | None:
        """The next batch; None when all trials are used up, or nothing new can be found."""
        assert self._reservoir is not None, "pre_tuning comes first"
        count = min(self._per_round, self._left)
        population = self.population or default_population(self._per_round)
        batch = self._reservoir.batch(count, population) if count > 0 else []
        self._left -= len(batch)
        return batch or None

    def notify_runner_results(self, measure_candidates: Any, results: Any) -> None:
        """Nothing: the session learns in the measure callback."""

    def clone(self) -> ReservoirSearch:
        """A search for another task, which has seen nothing yet."""
        return ReservoirSearch(self.session, self.population)


@dataclass(frozen=True, slots=True)
class _Held:
    """A valid candidate that has not been tried: its trace, and its features, shape (n_features,)."""

    trace: Any
    features: npt.NDArray[np.float64]


class _Reservoir:
    """The candidates of one task, by the structural hash of their module."""

    def __init__(
        self, session: Session, context: Any, design_spaces: Sequence[Any], database: Any
    ) -> None:
        self._session = session
        self._context = context
        self._module = context.mod
        self._workload = workload_hash(context.mod)
        self._database = database
        self._row = database.commit_workload(context.mod)
        self._postprocs = list(context.space_generator.postprocs or ())
        self._spaces = [
            (space.trace, Tilings(context.mod, space.trace, context.target))
            for space in design_spaces
        ]
        mutators = dict(context.space_generator.mutator_probs or {})
        self._mutators = list(mutators)
        weights = np.array([float(weight) for weight in mutators.values()])
        self._weights = weights / weights.sum() if len(weights) else weights
        self._features = FeatureReader()
        self._held: dict[int, _Held] = {}
        self._threads = ThreadPoolExecutor(max(1, int(context.num_threads)))
        earlier = _traces(database, self._workload)
        # Drawn anew after a resume, not the same once more.
        self._rng = np.random.default_rng([int(context.rand_state) & 0x7FFFFFFF, len(earlier)])
        self._seen: set[int] = set()
        self._new(earlier)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def batch(self, count: int, population: int) -> list[Any]:
        """Up to `count` candidates that have not been tried."""
        if not self._session.leads(self._workload):
            return [self._candidate(schedule) for schedule in self._draw(count).values()]
        mutants = population // 2
        self._hold(self._draw(population - mutants))
        # In two generations, so that good mutants of the first are parents of the second.
        for size in (mutants - mutants // 2, mutants // 2):
            self._hold(self._mutate(size))
        ranked = self._ranked()
        at_random = int(self._rng.binomial(count, _EPS_GREEDY))
        chosen, rest = ranked[: count - at_random], ranked[count - at_random :]
        chosen += [rest[index] for index in self._rng.permutation(len(rest))[:at_random]]
        schedules = [self._apply((self._held[name].trace, 1)) for name in chosen]
        for name in {*chosen, *rest[_HELD:]}:
            del self._held[name]
        return [self._candidate(schedule) for schedule in schedules if schedule is not None]

    @staticmethod
    def _candidate(schedule: Any) -> Any:
        # Of the scheduled module: its postprocessors may have given a buffer another layout.
        return MeasureCandidate(
            schedule, ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
        )

    # -- new candidates ------------------------------------------------------------------------

    def _apply(self, job: tuple[Any, int]) -> Any:
        """The schedule of a trace, postprocessed; None where it is not valid."""
        trace, seed = job
        schedule = Schedule(self._module, seed=seed, debug_mask="none", error_render_level="none")
        try:
            trace.apply_to_schedule(schedule, remove_postproc=True)
            schedule.enter_postproc()
            return schedule if all(each.apply(schedule) for each in self._postprocs) else None
        except Exception:  # TVM raises many kinds for a trace that cannot be applied
            return None

    def _new(self, traces: Iterable[Any]) -> dict[int, Any]:
        """Valid schedules of traces, without those that were met before."""
        jobs = [(trace, self._seed()) for trace in traces]
        found: dict[int, Any] = {}
        for schedule in self._threads.map(self._apply, jobs):
            if schedule is not None:
                found.setdefault(structural_hash(schedule.mod), schedule)
        found = {name: each for name, each in found.items() if name not in self._seen}
        self._seen.update(found)
        return found

    def _draw(self, count: int) -> dict[int, Any]:
        """Up to `count` new random schedules."""
        found: dict[int, Any] = {}
        for _ in range(_TRIES):
            wanted = count - len(found)
            if wanted <= 0:
                break
            spaces = np.bincount(
                self._rng.integers(len(self._spaces), size=wanted), minlength=len(self._spaces)
            )
            traces: list[Any] = []
            for (trace, tilings), number in zip(self._spaces, spaces, strict=True):
                instructions = trace.insts
                traces += [
                    Trace(instructions, {instructions[at]: drawn for at, drawn in sizes.items()})
                    for sizes in tilings.draw(self._rng, int(number))
                ]
            found.update(self._new(traces))
        return found

    def _mutate(self, count: int) -> dict[int, Any]:
        """Up to `count` new mutations of the best."""
        parents = self._parents(max(4, count // 2))
        if not parents or not self._mutators:
            return {}
        # A mutation keeps the instructions of its parent, and so the place of its tile sizes.
        tilings = [Tilings(self._module, trace, self._context.target) for trace in parents]
        traces = []
        for number in range(count):
            at = number % len(parents)
            for _ in range(_TRIES):
                mutator = self._mutators[self._rng.choice(len(self._mutators), p=self._weights)]
                trace = _ffi_api.MutatorApply(mutator, parents[at], self._seed())
                if trace is not None and tilings[at].fits(trace):
                    traces.append(trace)
                    break
        return self._new(traces)

    def _parents(self, count: int) -> list[Any]:
        """Traces of the fastest kernels and of the best predicted ones, in turn."""
        known = [record.trace for record in self._database.get_top_k(self._row, count // 2)]
        best = [self._held[name].trace for name in self._ranked()[: count - len(known)]]
        pairs = chain.from_iterable(zip_longest(known, best))
        return [trace for trace in pairs if trace is not None]

    def _seed(self) -> int:
        return int(self._rng.integers(1, 2**31 - 1))

    # -- what is remembered --------------------------------------------------------------------

    def _hold(self, schedules: dict[int, Any]) -> None:
        """Remember schedules by trace and features."""
        if not schedules:
            return
        candidates = [self._candidate(schedule) for schedule in schedules.values()]
        features = self._features(self._context, candidates)
        for (name, schedule), row in zip(schedules.items(), features, strict=True):
            self._held[name] = _Held(schedule.trace, row)

    def _ranked(self) -> list[int]:
        """All that are remembered, best score first."""
        names = list(self._held)
        if not names:
            return []
        features = np.stack([self._held[name].features for name in names])
        scores = self._session.scores(self._workload, features)
        return [names[index] for index in np.argsort(-scores, kind="stable")]


def _traces(database: Any, workload: str) -> list[Any]:
    """Traces of a workload's records."""
    names: dict[int, str] = {}  # many records share a workload, whose hash takes a while
    found = []
    for record in database.get_all_tuning_records():
        shared = record.workload
        if hash(shared) not in names:
            names[hash(shared)] = workload_hash(shared.mod)
        if names[hash(shared)] == workload:
            found.append(record.trace)
    return found
