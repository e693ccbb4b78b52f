"""Cooperative inference: split point, device clock and transmit power (after arXiv:2502.06295).

A device runs the first blocks of a network itself and sends what they computed to a server. Blocks 1..m run on the device at clock f, the tensor between block m and m+1 (d_m bits) is sent, the
server runs the others and answers. For a deadline D,

    t = sum_{i<=m} t_i(f) + d_m / R + t_server(m) + t_answer  <=  D
    E = sum_{i<=m} e_i(f) + p d_m / R + P_idle (D - sum_{i<=m} t_i(f))

m = 0 is full offload, m = M is local inference (nothing is sent). The abstract of the paper names
the problem; these equations and the method are our reconstruction, the standard form of the problem.

One device. For given (m, f) the transmission may take all the time that is left, and slower is
cheaper, so its power follows. All (m, f) are compared: the result is exact.

Several devices with a common bandwidth B: see `share_bandwidth`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvm_energy.dvfs.channel import Channel
from tvm_energy.dvfs.clock_table import ClockTable
from tvm_energy.errors import ConfigurationError, DeadlineImpossible

__all__ = ["Options", "PartitionTask", "Split", "options", "partition", "split_of"]

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTask:
    """One device with its network, its server and its deadline.

    Attributes:
        name: of the device.
        table: latency and energy of the blocks on the device.
        cut_bits: (blocks + 1,) bits that cross before the first block (the input), between blocks, and
            after the last one (the result, which is not sent by the device).
        server_s: (blocks,) latency of each block on the server; infinite where it cannot run there.
        channel: from the device to the server.
        deadline_s: D.
        input_on_server: the server has the input too, so full offload sends nothing.
        answer_s: how long the server's answer takes to arrive (not for local inference).
        idle_power_w: what the device draws while it does not compute, counted until the deadline.
    """

    name: str = "device"
    table: ClockTable
    cut_bits: Floats
    server_s: Floats
    channel: Channel
    deadline_s: float
    input_on_server: bool = False
    answer_s: float = 0.0
    idle_power_w: float = 0.0

    def __post_init__(self) -> None:
        blocks = len(self.table.blocks)
        cuts, server = np.asarray(self.cut_bits, float), np.asarray(self.server_s, float)
        if cuts.shape != (blocks + 1,) or server.shape != (blocks,):
            raise ConfigurationError(
                f"{blocks} blocks need {blocks + 1} cut sizes and {blocks} server latencies, "
                f"got {cuts.shape} and {server.shape}"
            )
        if not np.all(np.isfinite(cuts) & (cuts >= 0)):
            raise ConfigurationError(f"cut sizes must be 0 bits or more, got {cuts.tolist()}")
        if np.isnan(server).any() or np.any(server < 0):
            raise ConfigurationError(f"server latencies must be 0 s or more, got {server.tolist()}")
        if not (math.isfinite(self.deadline_s) and self.deadline_s > 0):
            raise ConfigurationError(f"the deadline must be positive, got {self.deadline_s} s")
        for name in ("answer_s", "idle_power_w"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{name} must be 0 or more, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What one device does.

    Attributes:
        name: of the device.
        local_blocks: how many blocks it runs itself: 0 is full offload, all is local inference.
        clock_mhz: of the device; None when it runs no block.
        transmit_power_w, rate_bps, sent_bits: of the transmission; 0 when nothing is sent.
        bandwidth_hz: of the channel (its share of a common one); 0 when nothing is sent or not known.
        local_s, transmit_s, server_s: the parts of the latency, the answer counted with the server.
        energy_j: of the device.
    """

    name: str
    local_blocks: int
    clock_mhz: float | None
    transmit_power_w: float
    rate_bps: float
    sent_bits: float
    bandwidth_hz: float
    local_s: float
    transmit_s: float
    server_s: float
    energy_j: float

    @property
    def latency_s(self) -> float:
        """From the start to the answer."""
        return self.local_s + self.transmit_s + self.server_s


@dataclass(frozen=True, slots=True)
class Options:
    """Every (split, clock) of one device, before anything is said about the transmission.

    Attributes:
        split, clock: (k,) blocks run locally; column of the clock table, -1 for none.
        energy_j: (k,) device energy without transmission.
        local_s, server_s: (k,) latency on the device; on the server with the answer.
        budget_s: (k,) what the deadline leaves for the transmission; may be negative.
        bits: (k,) to be sent.
    """

    split: Integers
    clock: Integers
    energy_j: Floats
    local_s: Floats
    server_s: Floats
    budget_s: Floats
    bits: Floats

    def take(self, index: Integers) -> Options:
        """Some of them."""
        return Options(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def options(task: PartitionTask) -> Options:
    """All choices of a device: full offload, and each split at each clock."""
    blocks, clocks = task.table.latency_s.shape
    split = np.concatenate([[0], np.repeat(np.arange(1, blocks + 1), clocks)])
    clock = np.concatenate([[-1], np.tile(np.arange(clocks), blocks)])
    local_s = np.concatenate([[0.0], np.cumsum(task.table.latency_s, axis=0).ravel()])
    local_j = np.concatenate([[0.0], np.cumsum(task.table.energy_j, axis=0).ravel()])
    # Sums from the end: an infinite entry must not spoil the splits after it.
    remaining = np.concatenate([np.cumsum(np.asarray(task.server_s, float)[::-1])[::-1], [0.0]])
    answer = np.where(split < blocks, task.answer_s, 0.0)
    bits = np.array(task.cut_bits, float)
    bits[blocks] = 0.0
    if task.input_on_server:
        bits[0] = 0.0
    server_s = remaining[split] + answer
    idle_j = task.idle_power_w * np.maximum(0.0, task.deadline_s - local_s)
    return Options(
        split=split,
        clock=clock,
        energy_j=local_j + idle_j,
        local_s=local_s,
        server_s=server_s,
        budget_s=task.deadline_s - local_s - server_s,
        bits=bits[split],
    )


def partition(task: PartitionTask) -> Split:
    """The split, clock and transmit power of least device energy within the deadline; exact.

    Of equal choices the faster one is taken.

    Raises:
        DeadlineImpossible: no choice meets the deadline; it names the nearest that can be met.
    """
    choices = options(task)
    # A sum of latencies may miss a deadline that was computed as that sum by a rounding error.
    budget = np.where(
        choices.budget_s < -1e-12 * task.deadline_s, -np.inf, np.maximum(choices.budget_s, 0)
    )
    power = task.channel.power_w(choices.bits, budget)
    sending = task.channel.sending_s(choices.bits, budget)
    possible = (budget >= 0) & np.isfinite(power)
    if not possible.any():
        raise _impossible(task, choices)
    energy = np.full(len(budget), np.inf)
    energy[possible] = choices.energy_j[possible] + power[possible] * sending[possible]
    latency = choices.local_s + choices.server_s + sending
    best = int(np.lexsort((latency, energy))[0])
    return split_of(
        task,
        choices,
        best,
        power_w=float(power[best]),
        sending_s=float(sending[best]),
        bandwidth_hz=getattr(task.channel, "bandwidth_hz", 0.0),
    )


def split_of(
    task: PartitionTask,
    choices: Options,
    index: int,
    *,
    power_w: float,
    sending_s: float,
    bandwidth_hz: float,
) -> Split:
    """The option with its transmission, as a `Split`."""
    sends = choices.bits[index] > 0
    clock = int(choices.clock[index])
    return Split(
        name=task.name,
        local_blocks=int(choices.split[index]),
        clock_mhz=None if clock < 0 else float(task.table.clocks_mhz[clock]),
        transmit_power_w=power_w if sends else 0.0,
        rate_bps=float(choices.bits[index]) / sending_s if sends else 0.0,
        sent_bits=float(choices.bits[index]),
        bandwidth_hz=bandwidth_hz if sends else 0.0,
        local_s=float(choices.local_s[index]),
        transmit_s=sending_s if sends else 0.0,
        server_s=float(choices.server_s[index]),
        energy_j=float(choices.energy_j[index]) + (power_w * sending_s if sends else 0.0),
    )


def _impossible(task: PartitionTask, choices: Options) -> DeadlineImpossible:
    rate = task.channel.max_rate_bps
    with np.errstate(divide="ignore", invalid="ignore"):
        sending = np.where(choices.bits > 0, choices.bits / rate, 0.0)
    nearest = float(np.min(choices.local_s + choices.server_s + sending))
    link = "" if rate else " (its channel has a rate of zero)"
    return DeadlineImpossible(
        f"{task.name}: no split, clock and transmit power meet a deadline of {task.deadline_s:.6g} s; "
        f"the nearest possible is {nearest:.6g} s{link}",
        nearest,
    )
