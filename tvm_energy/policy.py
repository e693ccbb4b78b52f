"""Which of the gated candidates get an energy measurement: state in, state out.

``all``        every one
``none``       no one
``fixed:F``    the fraction F with the lowest predicted energy
``snr``        a fraction k that shrinks while predictions are good and grows when they are not: the dynamic
               updating strategy of arXiv:2411.18873. What its text leaves open to us (the formula of the
               signal-to-noise ratio, its threshold, start, step and floor of k, the random probe) is our
               reconstruction, and each is an option: ``snr:threshold=3,step=0.2,start=1,floor=0.1``
``gain``       ours: one candidate at a time, the one with the largest expected improvement over the best
               measured kernel, until what is to be gained is not worth a measurement; a measurement ends
               as soon as it is clear on which side of the best it falls. ``gain:least=0.005,share=0.05,first=8``

A policy is asked again after its choice was measured, until it chooses nothing; all but ``gain`` choose
once a round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tvm_energy.errors import ConfigurationError

Floats = npt.NDArray[np.float64]

DEFAULT_POLICY = "gain"

#: Fewest pairs of measured and predicted energy that say anything about the quality of predictions.
_MIN_PAIRS = 3

#: Fewest errors whose distribution is taken for that of the next one.
_MIN_SCORES = 20


def _empty() -> Floats:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The candidates that passed the latency gate.

    Attributes:
        latency_s: measured, shape (n,).
        energy_j: predicted, shape (n,); None while there is no model.
        energy_stderr_j: standard error of the prediction, shape (n,); None with `energy_j`.
        cost: by the objective, of the measured energy where there is one, else of the predicted; shape
            (n,), infinite for a kernel that is too slow to win; None with `energy_j`.
        cost_stderr: its standard error, shape (n,); None with `energy_j`.
        scores: errors of earlier predictions in standard errors, shape (k,).
        best_cost: least cost of a measured kernel of the task; infinite while there is none.
        candidates: size of the batch that the gate was put to.
        done: True for those that were measured (or failed to be) in this round, shape (n,).
        keys: hashes of their schedule traces; no policy decides by them.
    """

    latency_s: Floats
    energy_j: Floats | None = None
    energy_stderr_j: Floats | None = None
    keys: tuple[str, ...] = ()
    cost: Floats | None = None
    cost_stderr: Floats | None = None
    scores: Floats = field(default_factory=_empty)
    best_cost: float = math.inf
    candidates: int = 0
    done: npt.NDArray[np.bool_] | None = None

    @property
    def open(self) -> npt.NDArray[np.int_]:
        """Indices of those not measured in this round."""
        if self.done is None:
            return np.arange(len(self.latency_s))
        return np.flatnonzero(~self.done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What one round of measuring brought.

    Attributes:
        gated, measured: numbers of candidates.
        measured_j, predicted_j: energies of the measured ones that had a prediction, shape (m,).
        earlier_j: energies measured in the task's earlier rounds, shape (e,).
    """

    gated: int = 0
    measured: int = 0
    measured_j: Floats = field(default_factory=_empty)
    predicted_j: Floats = field(default_factory=_empty)
    earlier_j: Floats = field(default_factory=_empty)

    @property
    def snr_db(self) -> float | None:
        """``10 log10(mean (E - mean E)^2 / mean (E - E_predicted)^2)``; None from too few pairs.

        Our reconstruction. The signal is the spread of the task's energies, so that a model that
        always predicts the mean gets about 0 dB, not a high value. It is taken over all rounds: the
        few kernels of one round, alike since the search and the gate chose them, would make any
        model look bad. The noise is that of this round's predictions.
        """
        if len(self.measured_j) < _MIN_PAIRS:
            return None
        signal = float(np.var(np.concatenate([self.earlier_j, self.measured_j])))
        noise = float(np.mean((self.measured_j - self.predicted_j) ** 2))
        if signal <= 0 or noise <= 0:
            return None
        return 10 * math.log10(signal / noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """State of a policy; goes into round records.

    Attributes:
        fraction: part of the gated candidates to be measured next (k).
        rounds: rounds seen.
    """

    fraction: float = 1.0
    rounds: int = 0


class Policy(Protocol):
    """Decides what is measured."""

    @property
    def races(self) -> bool:
        """True when a measurement may end as soon as it is clear whether it beats the best kernel."""
        ...

    @property
    def spec(self) -> str:
        """The string that `parse_policy` turns back into this policy."""
        ...

    def start(self) -> PolicyState:
        """State before the first round of a task."""
        ...

    def choose(self, state: PolicyState, gate: Gate, rng: np.random.Generator) -> list[int]:
        """Indices into the gate, in the order in which they are to be measured; none ends the round.

        Asked again, with `Gate.done` set, after those were measured.
        """
        ...

    def update(self, state: PolicyState, feedback: Feedback) -> PolicyState:
        """State after a round."""
        ...


def state_to_json(state: PolicyState) -> dict[str, Any]:
    """A state as JSON values."""
    return {"fraction": state.fraction, "rounds": state.rounds}


def state_from_json(values: Mapping[str, Any]) -> PolicyState:
    """The inverse of `state_to_json`; what is missing or out of range starts anew."""
    fraction, rounds = values.get("fraction", 1.0), values.get("rounds", 0)
    if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        fraction = 1.0
    if not isinstance(rounds, int) or rounds < 0:
        rounds = 0
    return PolicyState(fraction=float(fraction), rounds=rounds)


@dataclass(frozen=True)
class Fixed:
    """A fixed fraction of the gated candidates, lowest predicted energy first.

    Attributes:
        fraction: 1 measures all, 0 none.
        name: spec when it has a name of its own.
    """

    fraction: float
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ConfigurationError(
                f"the fraction of policy fixed must lie between 0 and 1, got {self.fraction}"
            )

    @property
    def races(self) -> bool:
        """See `Policy.races`."""
        return False

    @property
    def spec(self) -> str:
        """See `Policy.spec`."""
        return self.name or f"fixed:{self.fraction:g}"

    def start(self) -> PolicyState:
        """See `Policy.start`."""
        return PolicyState(fraction=self.fraction)

    def choose(self, state: PolicyState, gate: Gate, rng: np.random.Generator) -> list[int]:
        """See `Policy.choose`."""
        if self.fraction == 0 or len(gate.open) < len(gate.latency_s):
            return []
        return _lowest(gate, _count(self.fraction, gate), rng)

    def update(self, state: PolicyState, feedback: Feedback) -> PolicyState:
        """See `Policy.update`."""
        return PolicyState(fraction=self.fraction, rounds=state.rounds + 1)


@dataclass(frozen=True)
class Snr:
    """The dynamic updating strategy; see the module's text.

    Attributes:
        threshold: decibels; at or above it k shrinks, below it k grows. At 3 dB the predictions
            explain half of the variance among the measured kernels.
        step: by how much.
        start_fraction: k in the first round, where there is no model yet.
        floor: least k, so that the model is checked in every round.
    """

    threshold: float = 3.0
    step: float = 0.2
    start_fraction: float = 1.0
    floor: float = 0.1

    def __post_init__(self) -> None:
        if not (0 < self.step <= 1 and 0 < self.floor <= self.start_fraction <= 1):
            raise ConfigurationError(
                "policy snr needs 0 < step <= 1 and 0 < floor <= start <= 1, got "
                f"step={self.step:g}, floor={self.floor:g}, start={self.start_fraction:g}"
            )

    @property
    def races(self) -> bool:
        """See `Policy.races`."""
        return False

    @property
    def spec(self) -> str:
        """See `Policy.spec`."""
        return (
            f"snr:threshold={self.threshold:g},step={self.step:g},"
            f"start={self.start_fraction:g},floor={self.floor:g}"
        )

    def start(self) -> PolicyState:
        """See `Policy.start`."""
        return PolicyState(fraction=self.start_fraction)

    def choose(self, state: PolicyState, gate: Gate, rng: np.random.Generator) -> list[int]:
        """See `Policy.choose`: the k lowest predictions, then one random probe among the rest."""
        if len(gate.open) < len(gate.latency_s):
            return []
        chosen = _lowest(gate, _count(state.fraction, gate), rng)
        rest = sorted(set(range(len(gate.latency_s))) - set(chosen))
        if rest:
            chosen.append(int(rng.choice(rest)))
        return chosen

    def update(self, state: PolicyState, feedback: Feedback) -> PolicyState:
        """See `Policy.update`.

        Too few pairs to judge predictions by: measure more, or k could stay small for good. Nothing
        measured, or no spread: k stays as it is.
        """
        fraction = state.fraction
        snr_db = feedback.snr_db
        if snr_db is not None and snr_db >= self.threshold:
            fraction = max(self.floor, fraction - self.step)
        elif snr_db is not None or 0 < len(feedback.measured_j) < _MIN_PAIRS:
            fraction = min(1.0, fraction + self.step)
        return PolicyState(fraction=fraction, rounds=state.rounds + 1)


@dataclass(frozen=True)
class Gain:
    """Measure what can still change the winner; see ``docs/round.md``.

    For a candidate of predicted cost m with standard error s, least measured cost c, and scores z_1 ... z_k
    (errors of earlier predictions, in standard errors), the expected improvement (Jones, Schonlau and
    Welch, Journal of Global Optimization 13, 1998) is

        EI = mean over i of max(0, c - m - s z_i)

    and, while k < 20, that of a normal distribution. The candidate of largest EI is measured, c is brought up
    to date, and so on, until EI / c falls below `least` or `share` of the batch is measured. Expected improvement, not best-arm identification:
    candidates differ in what is known of them beforehand, and a measurement of one settles it; the
    knowledge gradient would add what a measurement teaches about the others, which the refit at the
    end of the round makes hard to say.

    Attributes:
        least: expected improvement, as a part of the best cost, that is worth a measurement.
        share: most candidates of a batch that are measured, once the model predicts.
        first: candidates measured before there is a model; half of them the fastest, the others drawn
            evenly over latency, so that the model sees slower kernels too.
    """

    least: float = 0.005
    share: float = 0.05
    first: int = 8

    def __post_init__(self) -> None:
        if not (0 <= self.least < 1 and 0 < self.share <= 1 and self.first >= 1):
            raise ConfigurationError(
                "policy gain needs 0 <= least < 1, 0 < share <= 1 and first >= 1, got "
                f"least={self.least:g}, share={self.share:g}, first={self.first}"
            )

    @property
    def races(self) -> bool:
        """See `Policy.races`."""
        return True

    @property
    def spec(self) -> str:
        """See `Policy.spec`."""
        return f"gain:least={self.least:g},share={self.share:g},first={self.first}"

    def start(self) -> PolicyState:
        """See `Policy.start`."""
        return PolicyState()

    def choose(self, state: PolicyState, gate: Gate, rng: np.random.Generator) -> list[int]:
        """See `Policy.choose`: the one with most to gain; without a model, a first sample."""
        rest = gate.open
        done = len(gate.latency_s) - len(rest)
        if not len(rest):
            return []
        if gate.cost is None or gate.cost_stderr is None:
            return [] if done else self._first_sample(gate)
        if done >= max(1, math.floor(self.share * gate.candidates)):
            return []
        gain = expected_improvement(
            gate.cost[rest], gate.cost_stderr[rest], gate.best_cost, gate.scores
        )
        most = int(np.argmax(gain))
        if math.isfinite(gate.best_cost) and gain[most] <= self.least * gate.best_cost:
            return []
        return [int(rest[most])] if gain[most] > 0 else []

    def _first_sample(self, gate: Gate) -> list[int]:
        order = np.argsort(gate.latency_s, kind="stable")
        count = min(self.first, len(order))
        fast = order[: (count + 1) // 2]
        others = order[len(fast) :]
        spread = np.linspace(0, len(others) - 1, count - len(fast)).round().astype(int)
        return [int(index) for index in (*fast, *others[spread])]

    def update(self, state: PolicyState, feedback: Feedback) -> PolicyState:
        """See `Policy.update`; the fraction is what was measured."""
        fraction = feedback.measured / feedback.gated if feedback.gated else state.fraction
        return PolicyState(fraction=min(1.0, fraction), rounds=state.rounds + 1)


def expected_improvement(
    cost: Floats, stderr: Floats, best: float, scores: Floats | None = None
) -> Floats:
    """Expected amount by which each of n costs falls below the best.

    Args:
        cost, stderr: shape (n,); an infinite cost cannot improve.
        best: infinite while nothing is known: then the lowest cost gains most.
        scores: errors in standard errors, shape (k,): each is as probable as the others. With fewer
            than `_MIN_SCORES`, errors are normally distributed.
    """
    finite = np.isfinite(cost)
    if not finite.any():
        return np.zeros(len(cost))
    if not math.isfinite(best):
        best = float(np.max(cost[finite] + stderr[finite]))
    below = np.where(finite, best - cost, 0.0)
    spread = np.maximum(np.where(finite, stderr, 1.0), 1e-12 * abs(best) + 1e-300)
    if scores is not None and len(scores) >= _MIN_SCORES:
        gains = np.maximum(below[:, None] - spread[:, None] * scores, 0.0).mean(axis=1)
        return np.where(finite, gains, 0.0)
    z = below / spread
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    share = 0.5 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in z]))
    return np.where(finite, np.maximum(below * share + spread * density, 0.0), 0.0)


def _count(fraction: float, gate: Gate) -> int:
    """At least one, where anything passed the gate."""
    # The tolerance keeps 0.3 * 10 from becoming 4.
    return math.ceil(fraction * len(gate.latency_s) - 1e-9)


def _lowest(gate: Gate, count: int, rng: np.random.Generator) -> list[int]:
    """The `count` lowest by predicted energy; at random while nothing is predicted."""
    if gate.energy_j is None:
        order = rng.permutation(len(gate.latency_s))
    else:
        order = np.argsort(gate.energy_j, kind="stable")
    return [int(index) for index in order[:count]]


def parse_policy(spec: str | Policy) -> Policy:
    """Turn a string such as ``snr`` or ``fixed:0.25`` into a policy.

    Raises:
        ConfigurationError: unknown name or option; the message lists the known ones.
    """
    if not isinstance(spec, str):
        return spec
    spec = spec.strip()
    name, _, rest = spec.partition(":")
    if spec in ("all", "none"):
        return Fixed(1.0 if spec == "all" else 0.0, spec)
    if name == "fixed":
        try:
            return Fixed(float(rest))
        except ValueError as exc:
            if isinstance(exc, ConfigurationError):
                raise
            raise ConfigurationError(
                f"policy {spec!r} needs a fraction; write fixed:0.25"
            ) from None
    if name in _OPTIONS:
        return _parse_options(spec, name, rest)
    raise ConfigurationError(
        f"unknown policy {spec!r}; known are all, none, fixed:0.25, snr, gain, "
        f"{Snr().spec} and {Gain().spec}"
    )


#: Policies with options: class, and option -> attribute.
_OPTIONS: dict[str, tuple[type[Snr] | type[Gain], dict[str, str]]] = {
    "snr": (
        Snr,
        {"threshold": "threshold", "step": "step", "start": "start_fraction", "floor": "floor"},
    ),
    "gain": (Gain, {"least": "least", "share": "share", "first": "first"}),
}


def _parse_options(spec: str, name: str, rest: str) -> Policy:
    build, fields = _OPTIONS[name]
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if key not in fields or not math.isfinite(number):
            known = ", ".join(f"{field_name}=" for field_name in fields)
            raise ConfigurationError(
                f"policy {spec!r}: {item!r} is not one of {known} with a number"
            )
        if key == "first" and number != int(number):
            raise ConfigurationError(f"policy {spec!r}: first must be a whole number, got {value}")
        options[fields[key]] = int(number) if key == "first" else number
    return build(**options)
