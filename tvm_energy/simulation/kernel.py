"""What a GPU kernel asks of the hardware: launch geometry, instructions, memory traffic.

A `KernelLaunch` is one CUDA kernel, a `KernelWork` the launches of one function in order. They are
plain numbers that hold for every device; `tvm_energy.simulation.gpu` turns them into time and power.
All counts are totals of one launch. "Warp instruction" counts an instruction once for 32 threads,
as the schedulers of a GPU do.

Symbols: a *request* is one memory instruction of one warp; a *sector* is 32 bytes, the unit that L1
and L2 move; a *wavefront* is one pass of a warp through shared memory, several where its threads
meet in one bank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tvm_energy.errors import ConfigurationError

SECTOR_BYTES = 32
WARP_SIZE = 32

#: Points (x, y) of a curve, x ascending.
Curve = tuple[tuple[float, float], ...]


class KernelRejected(ConfigurationError):
    """A kernel that a CUDA compiler or driver would refuse; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """Warp instructions of one launch, by the unit that executes them.

    Attributes:
        fma32: fused multiply-adds in float32.
        fp32: other float32 arithmetic (add, multiply, compare, select, convert).
        fp16: arithmetic in float16 or bfloat16 outside of the tensor cores.
        fp64: arithmetic in float64.
        integer: address and other integer arithmetic.
        special: exponentials, roots, divisions: what the special function unit does.
        control: loop counters, branches, predicates.
        shuffle: exchanges between the threads of a warp.
        barrier: waits for the whole block.
        tensor_flops: floating-point operations in tensor cores (not a count of instructions).
    """

    fma32: float = 0.0
    fp32: float = 0.0
    fp16: float = 0.0
    fp64: float = 0.0
    integer: float = 0.0
    special: float = 0.0
    control: float = 0.0
    shuffle: float = 0.0
    barrier: float = 0.0
    tensor_flops: float = 0.0

    def __post_init__(self) -> None:
        _require_not_negative(self)

    @property
    def arithmetic(self) -> float:
        """Issued warp instructions, memory and tensor instructions left out."""
        return (
            self.fma32
            + self.fp32
            + self.fp16
            + self.fp64
            + self.integer
            + self.special
            + self.control
            + self.shuffle
            + self.barrier
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalAccess:
    """One load or store statement to global (or spilled local) memory.

    Attributes:
        buffer: name of the buffer.
        store: True for a store.
        requests: warp instructions of the launch.
        bytes_requested: bytes that active threads asked for.
        sectors: 32-byte sectors of these requests; ``sectors * 32 / bytes_requested`` is 1 for
            perfectly coalesced requests and up to 8 for scattered float32.
        lines: 128-byte lines of these requests.
        block_reuse: points (bytes of cache that the block needs, bytes that it then fetches from
            L2); the first point is what a block fetches with hardly any cache. Empty for stores.
        launch_reuse: points (n, bytes): n consecutive blocks touch that many different bytes. The
            last point is the whole launch.
    """

    buffer: str
    store: bool
    requests: float
    bytes_requested: float
    sectors: float
    lines: float
    block_reuse: Curve = ()
    launch_reuse: Curve

    def __post_init__(self) -> None:
        _require_not_negative(self)
        object.__setattr__(self, "block_reuse", _curve(self.block_reuse, "block_reuse"))
        object.__setattr__(self, "launch_reuse", _curve(self.launch_reuse, "launch_reuse"))
        if not self.launch_reuse:
            raise ConfigurationError(f"access to {self.buffer!r}: launch_reuse needs a point")

    @property
    def unique_bytes(self) -> float:
        """Different bytes that the launch touches: the least traffic to DRAM from a cold cache."""
        return self.launch_reuse[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTraffic:
    """Traffic to shared memory of one launch.

    Attributes:
        load_requests, store_requests: warp instructions.
        load_wavefronts, store_wavefronts: passes, bank conflicts and wide accesses included.
        load_bytes, store_bytes: bytes for active threads (a broadcast counts for each thread).
    """

    load_requests: float = 0.0
    store_requests: float = 0.0
    load_wavefronts: float = 0.0
    store_wavefronts: float = 0.0
    load_bytes: float = 0.0
    store_bytes: float = 0.0

    def __post_init__(self) -> None:
        _require_not_negative(self)

    @property
    def wavefronts(self) -> float:
        """Passes through shared memory, loads and stores."""
        return self.load_wavefronts + self.store_wavefronts

    @property
    def requests(self) -> float:
        """Warp instructions, loads and stores."""
        return self.load_requests + self.store_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
    """One CUDA kernel, launched once.

    Attributes:
        name: for people.
        blocks: thread blocks in the grid.
        threads_per_block: threads in a block.
        shared_bytes_per_block: shared memory of a block.
        registers_per_thread: estimate; the compiler's own number is not known here.
        instructions: arithmetic and control.
        global_accesses: one entry for each statement that touches global memory.
        shared: traffic to shared memory.
        lane_share: part of the threads of issued arithmetic warps that do useful work, 0 to 1.
        ilp: independent arithmetic instructions that one thread offers at a time.
        dependent_loads: groups of global loads that one thread waits for, one after the other.
        barriers_per_block: times that a block waits for all of its threads.
        pipeline_stages: 1 when a block loads, waits and computes in turn; more when it loads ahead.
    """

    name: str
    blocks: int
    threads_per_block: int
    shared_bytes_per_block: int = 0
    registers_per_thread: int = 32
    instructions: Instructions = field(default_factory=Instructions)
    global_accesses: tuple[GlobalAccess, ...] = ()
    shared: SharedTraffic = field(default_factory=SharedTraffic)
    lane_share: float = 1.0
    ilp: float = 1.0
    dependent_loads: float = 0.0
    barriers_per_block: float = 0.0
    pipeline_stages: int = 1

    def __post_init__(self) -> None:
        _require_not_negative(self)
        if self.blocks < 1 or not 1 <= self.threads_per_block <= 1024:
            raise ConfigurationError(
                f"kernel {self.name!r}: needs at least 1 block of 1 to 1024 threads, "
                f"got {self.blocks} of {self.threads_per_block}"
            )
        if not 0 < self.lane_share <= 1:
            raise ConfigurationError(
                f"kernel {self.name!r}: lane_share must lie in (0, 1], got {self.lane_share}"
            )

    @property
    def warps_per_block(self) -> int:
        """Warps of a block; the last one may be partly empty."""
        return math.ceil(self.threads_per_block / WARP_SIZE)

    @property
    def flops(self) -> float:
        """Floating-point operations of active threads (a fused multiply-add counts 2)."""
        count = self.instructions
        scalar = 2 * count.fma32 + count.fp32 + count.fp16 + count.fp64 + count.special
        return scalar * WARP_SIZE * self.lane_share + count.tensor_flops


@dataclass(frozen=True, kw_only=True)
class KernelWork:
    """The launches of one function, in order."""

    launches: tuple[KernelLaunch, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "launches", tuple(self.launches))
        if not self.launches:
            raise ConfigurationError("a kernel needs at least one launch, got none")

    @property
    def flops(self) -> float:
        """Floating-point operations of all launches."""
        return sum(launch.flops for launch in self.launches)

    @cached_property
    def digest(self) -> str:
        """Hash of the content, names left out: equal for equal work on every machine."""
        values = self.to_json()
        for launch in values["launches"]:
            del launch["name"]
            for access in launch["global_accesses"]:
                del access["buffer"]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        """All attributes as JSON values."""
        return {"launches": [dataclasses.asdict(launch) for launch in self.launches]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> KernelWork:
        """The inverse of `to_json`.

        Raises:
            ConfigurationError: a value is missing, unknown, of the wrong type, or out of range.
        """
        try:
            return cls(launches=tuple(_launch_from_json(item) for item in values["launches"]))
        except (KeyError, TypeError, AttributeError, OverflowError) as exc:
            raise ConfigurationError(f"not the description of a kernel: {exc!r}") from exc


def _launch_from_json(values: Mapping[str, Any]) -> KernelLaunch:
    return KernelLaunch(
        **{
            **values,
            "instructions": Instructions(**values["instructions"]),
            "global_accesses": tuple(GlobalAccess(**item) for item in values["global_accesses"]),
            "shared": SharedTraffic(**values["shared"]),
        }
    )


def _curve(points: Sequence[Sequence[float]], name: str) -> Curve:
    curve = tuple((float(x), float(y)) for x, y in points)
    if any(not (math.isfinite(x) and math.isfinite(y) and x >= 0 and y >= 0) for x, y in curve):
        raise ConfigurationError(f"{name} must hold finite numbers from 0, got {curve}")
    if any(later[0] < earlier[0] for earlier, later in itertools.pairwise(curve)):
        raise ConfigurationError(f"{name} must be sorted by its first column, got {curve}")
    return curve


def _require_not_negative(item: Any) -> None:
    for attribute in dataclasses.fields(item):
        name, kind = attribute.name, attribute.type
        value = getattr(item, name)
        if kind in ("int", "float"):
            wrong = isinstance(value, bool) or not isinstance(value, (int, float))
            if wrong or not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(
                    f"{type(item).__name__}.{name} must be a number from 0, got {value!r}"
                )
        elif kind == "bool" and not isinstance(value, bool):
            raise ConfigurationError(
                f"{type(item).__name__}.{name} must be true or false, got {value!r}"
            )
