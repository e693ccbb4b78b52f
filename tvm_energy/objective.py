"""What counts as better: small classes that rank (latency, energy) pairs.

Written as strings everywhere (command line, Python, log header)::

    latency                 least time
    energy                  least energy
    edp, ed2p               least energy x time, energy x time^2
    energy:slack=0.05       least energy among kernels at most 5 % slower than the fastest known (default)
    weighted:eta=0.5        least eta * E + (1 - eta) * P_max * T  (the cost of Zeus, NSDI'23)

Costs are lower-is-better and comparable only within one task. Raw latency and energy are what logs
store, so that any log can be ranked again under another objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tvm_energy.errors import ConfigurationError

Floats = npt.NDArray[np.float64]

DEFAULT_OBJECTIVE = "energy:slack=0.05"

#: How steeply a kernel beyond the latency limit is penalised while searching (exponent).
_SEARCH_PENALTY = 4.0


class Objective(Protocol):
    """Ranks kernels of one task."""

    @property
    def needs_energy(self) -> bool:
        """False when latency alone decides."""
        ...

    @property
    def slack(self) -> float:
        """How much slower than the fastest a kernel may be and still be worth an energy measurement."""
        ...

    @property
    def spec(self) -> str:
        """The string that `parse_objective` turns back into this objective."""
        ...

    def cost(self, latency_s: Floats, energy_j: Floats, best_latency_s: float) -> Floats:
        """Cost of each kernel, shape (n,); infinite where the kernel is not acceptable."""
        ...

    def search_cost(self, latency_s: Floats, energy_j: Floats, best_latency_s: float) -> Floats:
        """Like `cost`, but finite and smooth, to lead a search from outside into the limit."""
        ...


@dataclass(frozen=True)
class Latency:
    """cost = T."""

    needs_energy = False
    slack = 0.0

    @property
    def spec(self) -> str:
        """See `Objective.spec`."""
        return "latency"

    def cost(self, latency_s: Floats, energy_j: Floats, best_latency_s: float) -> Floats:
        """See `Objective.cost`."""
        return np.asarray(latency_s, dtype=np.float64)

    search_cost = cost


@dataclass(frozen=True)
class EnergyDelay:
    """cost = E * T^exponent: energy (0), energy-delay product (1), ED2P (2)."""

    exponent: int = 0
    needs_energy = True
    # Without a limit on latency a slower kernel may still win, but the field's experience (and our
    # simulations) is that least energy lies near least time at a fixed clock.
    slack = 0.25

    @property
    def spec(self) -> str:
        """See `Objective.spec`."""
        return ("energy", "edp", "ed2p")[self.exponent]

    def cost(self, latency_s: Floats, energy_j: Floats, best_latency_s: float) -> Floats:
        """See `Objective.cost`."""
        return np.asarray(energy_j) * np.asarray(latency_s) ** self.exponent

    search_cost = cost


@dataclass(frozen=True)
class SlowdownBound:
    """cost = E where T <= (1 + slack) * best T, else infinite."""

    slack: float = 0.05
    needs_energy = True

    def __post_init__(self) -> None:
        if not 0 <= self.slack <= 10:
            raise ConfigurationError(
                f"slack must lie between 0 and 10 (0.05 is 5 %), got {self.slack}"
            )

    @property
    def spec(self) -> str:
        """See `Objective.spec`."""
        return f"energy:slack={self.slack:g}"

    def cost(self, latency_s: Floats, energy_j: Floats, best_latency_s: float) -> Floats:
        """See `Objective.cost`."""
        limit = (1 + self.slack) * best_latency_s
        return np.where(np.asarray(latency_s) <= limit, energy_j, np.inf)

    def search_cost(self, latency_s: Floats, energy_j: Floats, best_latency_s: float) -> Floats:
        """See `Objective.search_cost`: energy x (T / limit)^4 beyond the limit."""
        limit = (1 + self.slack) * best_latency_s
        excess = np.maximum(1.0, np.asarray(latency_s) / limit)
        return np.asarray(energy_j) * excess**_SEARCH_PENALTY


@dataclass(frozen=True)
class Weighted:
    """cost = eta * E + (1 - eta) * P_max * T (You et al., Zeus, NSDI'23).

    Attributes:
        eta: 1 counts energy only, 0 time only.
        max_power_w: P_max, the device's power limit; turns seconds into joules.
    """

    eta: float
    max_power_w: float
    needs_energy = True
    slack = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ConfigurationError(f"eta must lie between 0 and 1, got {self.eta}")
        if not self.max_power_w > 0:
            raise ConfigurationError(f"max_power_w must be positive, got {self.max_power_w}")

    @property
    def spec(self) -> str:
        """See `Objective.spec`."""
        return f"weighted:eta={self.eta:g},max_power_w={self.max_power_w:g}"

    def cost(self, latency_s: Floats, energy_j: Floats, best_latency_s: float) -> Floats:
        """See `Objective.cost`."""
        time_cost = self.max_power_w * np.asarray(latency_s)
        return self.eta * np.asarray(energy_j) + (1 - self.eta) * time_cost

    search_cost = cost


def parse_objective(spec: str | Objective, *, max_power_w: float | None = None) -> Objective:
    """Turn a string such as ``energy:slack=0.05`` into an objective.

    Args:
        spec: the string; an objective is returned as it is.
        max_power_w: the device's power limit, used by ``weighted`` when the string does not give one.

    Raises:
        ConfigurationError: unknown name or option; the message lists the known ones.
    """
    if not isinstance(spec, str):
        return spec
    name, options = parse_spec(spec, "objective")
    try:
        build = _BUILDERS[name]
    except KeyError:
        known = ", ".join(_EXAMPLES)
        raise ConfigurationError(f"unknown objective {spec!r}; known are {known}") from None
    if name == "weighted" and "max_power_w" not in options:
        if max_power_w is None:
            raise ConfigurationError(
                f"objective {spec!r} needs the device's power limit, which is not known here; "
                "write weighted:eta=0.5,max_power_w=400"
            )
        options["max_power_w"] = max_power_w
    try:
        return build(**options)
    except TypeError:
        raise ConfigurationError(
            f"objective {spec!r} has an option that {name!r} does not know; "
            f"write it like one of {', '.join(_EXAMPLES)}"
        ) from None


def parse_spec(spec: str, what: str) -> tuple[str, dict[str, float]]:
    """Split ``name:key=number,key=number``.

    Raises:
        ConfigurationError: an option without a number.
    """
    name, _, rest = spec.strip().partition(":")
    options: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        try:
            number = float(value) if equals else float("nan")
        except ValueError:
            number = float("nan")
        if not np.isfinite(number):
            raise ConfigurationError(f"{what} {spec!r}: {item!r} is not of the form option=number")
        options[key.strip()] = number
    return name, options


def _energy(slack: float | None = None) -> Objective:
    return EnergyDelay(0) if slack is None else SlowdownBound(slack)


_BUILDERS: dict[str, Callable[..., Objective]] = {
    "latency": lambda: Latency(),
    "energy": _energy,
    "edp": lambda: EnergyDelay(1),
    "ed2p": lambda: EnergyDelay(2),
    "weighted": lambda eta=0.5, max_power_w=0.0: Weighted(eta, max_power_w),
}
_EXAMPLES = ("latency", "energy", "edp", "ed2p", DEFAULT_OBJECTIVE, "weighted:eta=0.5")
