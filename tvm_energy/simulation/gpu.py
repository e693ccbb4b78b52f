"""Time and power of a kernel on a simulated GPU.

Time. Blocks run in waves of as many as fit on the multiprocessors. n blocks on one multiprocessor take

    T(n) = busy + exposed
    busy = (compute^p + load_store^p + l2^p + dram^p + chain^p)^(1/p),   p = 4
    exposed = (wait^p + hidden^p)^(1/p) - hidden

``compute`` is the busiest of the issue slots and arithmetic pipes, ``load_store``, ``l2`` and ``dram`` are the
times of these units, ``chain`` is one warp's instructions one after the other. The longest dominates;
others of like length get in its way. ``wait`` is how long one warp waits for global memory, one group of
loads after the other; ``hidden`` is the work that others do meanwhile: other warps, or, where
barriers make the warps of a block wait together, other blocks; or the block's own work, where it loads
ahead. A launch is the full waves plus a last, smaller one, plus the gap between launches.

Caches. A block fetches from L2 what its reuse curve says for its share of L1. L2 serves again what
blocks of one wave share; what earlier waves fetched, as far as everything fits. A small kernel finds its
arguments in L2 from the launch before, as it does in any repeated measurement.

Power. P = constant + static + dynamic / T; static grows with voltage, temperature and busy
multiprocessors (the split of AccelWattch, MICRO'21); dynamic is counts x energy x voltage^2. Where P
exceeds the limit, the clock falls step by step until it fits.

What no feature explains (instruction order, register banks, clock domains ...) is a factor on time and
one on dynamic energy that depend on the kernel's content alone, log-normal with `TIME_SPREAD` and
`ENERGY_SPREAD`. The one on time is never below 1, so that no kernel beats the hardware; its median is
``exp(2 TIME_SPREAD)``.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

from tvm_energy.errors import ConfigurationError
from tvm_energy.simulation.devices import DeviceSpec
from tvm_energy.simulation.kernel import (
    SECTOR_BYTES,
    WARP_SIZE,
    Curve,
    GlobalAccess,
    KernelLaunch,
    KernelRejected,
    KernelWork,
)

#: Standard deviation of the logarithm of the unexplained factors on time and on dynamic energy.
TIME_SPREAD = 0.02
ENERGY_SPREAD = 0.03

#: Temperature of a kernel's truth where none is given.
NOMINAL_TEMPERATURE_C = 60.0

#: How sharply the longest of the overlapping times decides (estimate).
_OVERLAP_EXPONENT = 4.0
_BARRIER_CLOCKS = 24.0  # estimate
_LAUNCH_RAMP_CLOCKS = 900.0  # estimate: block scheduling, first instruction fetch, drain
_IDLE_LANE_ENERGY = 0.25  # estimate: an inactive lane still clocks its pipeline registers
# From the CUDA occupancy calculator, compute capability 8.0 and later:
_REGISTER_GRANULE = 256  # a warp's registers are handed out in such units
_SHARED_RESERVED = 1024  # bytes of shared memory that each block takes on top


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTruth:
    """What a kernel truly costs on the simulated device: free of noise, for one launch.

    Attributes:
        latency_s: seconds from launch to launch in a full queue.
        power_w: mean power over that time.
        energy_j: ``power_w * latency_s``.
        clock_mhz: core clock that it runs at.
        throttled: True when the power limit lowered the clock.
        breakdown: joules by cause (``*_j``, their sum is ``energy_j``), seconds by bottleneck
            (``*_s``), bytes (``*_bytes``), ``occupancy`` (resident warps over the most possible).
    """

    latency_s: float
    power_w: float
    energy_j: float
    clock_mhz: float
    throttled: bool
    breakdown: Mapping[str, float]


def simulate(
    spec: DeviceSpec,
    work: KernelWork,
    *,
    clock_mhz: float | None = None,
    temperature_c: float | None = None,
    seed: int = 0,
) -> KernelTruth:
    """Time, power and energy of one run of ``work`` (all its launches).

    Args:
        spec: the device.
        work: the kernel.
        clock_mhz: locked core clock, the nearest supported one is taken; None is the highest.
        temperature_c: die temperature; None is `NOMINAL_TEMPERATURE_C`.
        seed: which card of this kind: another seed draws other unexplained factors.

    Raises:
        KernelRejected: the kernel does not fit on the device.
        ConfigurationError: a clock or temperature that makes no sense.
    """
    if clock_mhz is not None and not (math.isfinite(clock_mhz) and clock_mhz > 0):
        raise ConfigurationError(f"clock_mhz must be positive, got {clock_mhz}")
    temperature = NOMINAL_TEMPERATURE_C if temperature_c is None else temperature_c
    if not -50 <= temperature <= 150:
        raise ConfigurationError(f"temperature_c must lie from -50 to 150, got {temperature_c}")
    wanted = spec.max_clock_mhz if clock_mhz is None else spec.nearest_clock_mhz(clock_mhz)
    demands = [_demand(spec, launch) for launch in work.launches]
    factors = _unexplained(spec, work, seed)

    def at(clock: float) -> KernelTruth:
        return _cost(spec, demands, clock, temperature, factors)

    truth = at(wanted)
    if truth.power_w <= spec.power_limit_w:
        return truth
    return _throttle(spec, at, wanted)


def _throttle(
    spec: DeviceSpec, at: Callable[[float], KernelTruth], wanted_mhz: float
) -> KernelTruth:
    """The highest clock below ``wanted_mhz`` whose power fits the limit, by bisection."""
    clocks = [clock for clock in spec.clocks_mhz if clock < wanted_mhz]
    if not clocks:
        clocks = [wanted_mhz]
    low, high = 0, len(clocks) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if at(clocks[middle]).power_w <= spec.power_limit_w:
            low = middle
        else:
            high = middle - 1
    truth = at(clocks[low])
    return KernelTruth(
        latency_s=truth.latency_s,
        power_w=truth.power_w,
        energy_j=truth.energy_j,
        clock_mhz=truth.clock_mhz,
        throttled=True,
        breakdown=truth.breakdown,
    )


# ---- what a launch demands, whatever the clock ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Demand:
    """One launch on one device: residency, traffic, clocks of each pipe, energies."""

    launch: KernelLaunch
    resident_blocks: int  # on one multiprocessor
    resident_warps: int
    l2_bytes: float
    dram_bytes: float
    pipe_clocks: dict[str, float]  # of one block on one multiprocessor
    chain_clocks: float  # one warp alone, arithmetic and shared memory one after the other
    wait_clocks: float  # one warp, waiting for L2
    wait_s: float  # ... and for DRAM
    energies: dict[str, float]  # dynamic, joules at the reference voltage, voltage-scaled part


def _demand(spec: DeviceSpec, launch: KernelLaunch) -> _Demand:
    resident = _resident_blocks(spec, launch)
    warps = resident * launch.warps_per_block
    l2_bytes = _l2_bytes(spec, launch, resident)
    dram_bytes = _dram_bytes(spec, launch, resident, l2_bytes)
    sectors = sum(access.sectors for access in launch.global_accesses)
    from_dram = min(1.0, dram_bytes / max(l2_bytes, 1.0))
    waits = launch.dependent_loads
    return _Demand(
        launch=launch,
        resident_blocks=resident,
        resident_warps=warps,
        l2_bytes=l2_bytes,
        dram_bytes=dram_bytes,
        pipe_clocks=_pipe_clocks(spec, launch),
        chain_clocks=_chain_clocks(spec, launch),
        wait_clocks=waits * spec.l2_latency_clocks,
        wait_s=waits * from_dram * spec.dram_latency_s,
        energies=_energies(spec, launch, sectors, l2_bytes),
    )


def _resident_blocks(spec: DeviceSpec, launch: KernelLaunch) -> int:
    """How many blocks one multiprocessor holds at a time."""
    if launch.shared_bytes_per_block > spec.max_shared_bytes_per_block:
        raise KernelRejected(
            f"kernel {launch.name!r} needs {launch.shared_bytes_per_block} bytes of shared memory, "
            f"{spec.full_name} allows {spec.max_shared_bytes_per_block}"
        )
    registers = min(launch.registers_per_thread, spec.max_registers_per_thread)
    registers_per_warp = _round_up(registers * WARP_SIZE, _REGISTER_GRANULE)
    by_registers = spec.registers_per_sm // (registers_per_warp * launch.warps_per_block)
    if by_registers == 0:
        raise KernelRejected(
            f"kernel {launch.name!r} needs {registers} registers in each of "
            f"{launch.threads_per_block} threads, {spec.full_name} has {spec.registers_per_sm}"
        )
    by_threads = spec.max_threads_per_sm // (launch.warps_per_block * WARP_SIZE)
    by_shared = spec.max_blocks_per_sm
    if launch.shared_bytes_per_block:
        by_shared = spec.max_shared_bytes_per_sm // (
            launch.shared_bytes_per_block + _SHARED_RESERVED
        )
    return max(1, min(by_registers, by_threads, by_shared, spec.max_blocks_per_sm))


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


def _l2_bytes(spec: DeviceSpec, launch: KernelLaunch, resident: int) -> float:
    """Bytes between L1 and L2: stores as they are, loads as far as L1 misses."""
    shared = resident * (launch.shared_bytes_per_block + _SHARED_RESERVED)
    cache = max(0.0, spec.l1_bytes - shared) / resident
    loads = [access for access in launch.global_accesses if not access.store]
    share = cache / max(1, len(loads))
    return sum(_fetched(access, launch.blocks, share) for access in launch.global_accesses)


def _fetched(access: GlobalAccess, blocks: int, cache_bytes: float) -> float:
    requested = access.sectors * SECTOR_BYTES
    if access.store or not access.block_reuse:
        return requested
    return min(requested, blocks * _interpolate(access.block_reuse, cache_bytes))


def _dram_bytes(spec: DeviceSpec, launch: KernelLaunch, resident: int, l2_bytes: float) -> float:
    """Bytes between L2 and DRAM in one launch of many in a row."""
    footprint = _footprint(launch)
    wave = min(launch.blocks, spec.sms * resident)
    waves = launch.blocks / wave
    kept = min(1.0, spec.l2_bytes / max(footprint, 1.0))
    cold = 0.0
    for access in launch.global_accesses:
        unique = access.unique_bytes
        refetched = max(0.0, waves * _interpolate(access.launch_reuse, wave) - unique)
        cold += unique + (1 - kept) * refetched
    # Fits in 0.7 of L2: nothing is lost between launches. 1.5 times L2: everything is (estimate;
    # L2 does not replace lines strictly in the order of use).
    lost = min(1.0, max(0.0, (footprint / spec.l2_bytes - 0.7) / 0.8))
    return lost * min(cold, max(l2_bytes, 1.0))


def _footprint(launch: KernelLaunch) -> float:
    """Different bytes that the launch touches; a buffer loaded by two statements counts once."""
    largest: dict[str, float] = {}
    for access in launch.global_accesses:
        largest[access.buffer] = max(largest.get(access.buffer, 0.0), access.unique_bytes)
    return sum(largest.values())


def _interpolate(curve: Curve, x: float) -> float:
    """Value of a curve at x, straight in the logarithm of x, constant beyond its ends."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x < x1:
            part = math.log((x + 1) / (x0 + 1)) / math.log((x1 + 1) / (x0 + 1))
            return y0 + part * (y1 - y0)
    return curve[-1][1]


def _pipe_clocks(spec: DeviceSpec, launch: KernelLaunch) -> dict[str, float]:
    """Clocks that one block keeps each unit of one multiprocessor busy."""
    count, accesses = launch.instructions, launch.global_accesses
    requests = sum(access.requests for access in accesses)
    tensor_issue = (
        count.tensor_flops / 8192
    )  # an mma of 16x8x16 has 4096 flops and one fragment move
    l1_passes = sum(max(access.lines, access.sectors / 4) for access in accesses)
    totals = {
        "issue": (count.arithmetic + requests + launch.shared.requests + tensor_issue)
        / spec.schedulers,
        "fp32": (count.fma32 + count.fp32) * WARP_SIZE / spec.fp32_lanes,
        "fp16": count.fp16 * WARP_SIZE / spec.fp16_lanes,
        "fp64": count.fp64 * WARP_SIZE / spec.fp64_lanes,
        "integer": count.integer * WARP_SIZE / spec.int_lanes,
        "special": count.special * WARP_SIZE / spec.special_lanes,
        "tensor": count.tensor_flops / spec.tensor_flops_per_clock,
        "load_store": launch.shared.wavefronts + count.shuffle + l1_passes,
    }
    return {name: clocks / launch.blocks for name, clocks in totals.items()}


def _chain_clocks(spec: DeviceSpec, launch: KernelLaunch) -> float:
    """Clocks of one warp that has the multiprocessor for itself, waits for global memory left out."""
    count, shared = launch.instructions, launch.shared
    warps = launch.blocks * launch.warps_per_block
    gap = max(1.0, spec.alu_latency_clocks / max(launch.ilp, 1.0))
    special = count.special * (spec.alu_latency_clocks + 16) / max(launch.ilp, 1.0)
    loads = shared.load_requests * spec.shared_latency_clocks / max(2 * launch.ilp, 2.0)
    shuffles = count.shuffle * spec.shared_latency_clocks
    tensor = count.tensor_flops / 4096 * 18 / max(launch.ilp, 1.0)  # 18 clocks an mma [mb]
    per_warp = (
        (count.arithmetic - count.shuffle) * gap + special + loads + shuffles + tensor
    ) / warps
    return per_warp + launch.barriers_per_block * _BARRIER_CLOCKS


def _energies(
    spec: DeviceSpec, launch: KernelLaunch, sectors: float, l2_bytes: float
) -> dict[str, float]:
    """Dynamic energy by cause, joules at the reference voltage."""
    table, count = spec.energy, launch.instructions
    requests = sum(access.requests for access in launch.global_accesses)
    lanes = WARP_SIZE * (launch.lane_share + _IDLE_LANE_ENERGY * (1 - launch.lane_share))
    arithmetic = lanes * (
        count.fma32 * table.fma32_j
        + count.fp32 * table.fp32_j
        + count.fp16 * table.fp16_j
        + count.fp64 * table.fp64_j
        + (count.integer + 0.5 * count.control) * table.integer_j
        + (count.special + count.shuffle) * table.special_j
    )
    issued = count.arithmetic + requests + launch.shared.requests + count.tensor_flops / 8192
    shared_bytes = launch.shared.load_bytes + launch.shared.store_bytes
    return {
        "issue_j": issued * table.issue_j,
        "arithmetic_j": arithmetic,
        "tensor_j": count.tensor_flops * table.tensor_flop_j,
        "shared_j": launch.shared.wavefronts * table.shared_wavefront_j
        + shared_bytes * table.shared_byte_j,
        "l1_j": sectors * table.l1_sector_j,
        "l2_j": l2_bytes * table.l2_byte_j,
    }


# ---- time and power at one clock ----------------------------------------------------------------


def _cost(
    spec: DeviceSpec,
    demands: list[_Demand],
    clock_mhz: float,
    temperature_c: float,
    factors: tuple[float, float],
) -> KernelTruth:
    time_factor, energy_factor = factors
    voltage = spec.voltage(clock_mhz)
    totals: dict[str, float] = {}
    latency_s = 0.0
    for demand in demands:
        run_s, parts = _run_time(spec, demand, clock_mhz)
        run_s *= time_factor
        span_s = run_s + spec.launch_gap_s
        busy = min(1.0, demand.launch.blocks / spec.sms)
        dynamic = {
            name: joules * voltage**2 * energy_factor for name, joules in demand.energies.items()
        }
        clocks = run_s * clock_mhz * 1e6
        dynamic["clock_j"] = busy * spec.sms * clocks * spec.energy.sm_clock_j * voltage**2
        dynamic["dram_j"] = demand.dram_bytes * spec.energy.dram_byte_j * energy_factor
        dynamic["static_j"] = span_s * _static_power_w(spec, voltage, temperature_c, busy)
        dynamic["constant_j"] = span_s * spec.constant_power_w
        traffic = {"l2_bytes": demand.l2_bytes, "dram_bytes": demand.dram_bytes}
        for name, value in {**dynamic, **parts, **traffic}.items():
            totals[name] = totals.get(name, 0.0) + value
        latency_s += span_s
    energy_j = sum(value for name, value in totals.items() if name.endswith("_j"))
    longest = max(demands, key=lambda demand: demand.launch.blocks)
    totals["occupancy"] = longest.resident_warps * WARP_SIZE / spec.max_threads_per_sm
    return KernelTruth(
        latency_s=latency_s,
        power_w=energy_j / latency_s,
        energy_j=energy_j,
        clock_mhz=clock_mhz,
        throttled=False,
        breakdown=totals,
    )


def _static_power_w(spec: DeviceSpec, voltage: float, temperature_c: float, busy: float) -> float:
    """Leakage: voltage squared (current rises with voltage), linear in temperature and busy part."""
    gated = 1 - spec.gated_static_share * (1 - busy)
    warm = 1 + spec.leakage_per_c * (temperature_c - NOMINAL_TEMPERATURE_C)
    return spec.static_power_w * voltage**2 * gated * max(0.2, warm)


def _run_time(
    spec: DeviceSpec, demand: _Demand, clock_mhz: float
) -> tuple[float, dict[str, float]]:
    """Seconds of one launch without the gap, and seconds by bottleneck."""
    blocks = demand.launch.blocks
    wave = spec.sms * demand.resident_blocks
    full, rest = divmod(blocks, wave)
    total_s = _LAUNCH_RAMP_CLOCKS / (clock_mhz * 1e6)
    parts: dict[str, float] = {}
    for repeats, size in ((full, wave), (1, rest)):
        if not repeats or not size:
            continue
        seconds, causes = _wave_time(spec, demand, size, clock_mhz)
        total_s += repeats * seconds
        for name, value in causes.items():
            parts[name] = parts.get(name, 0.0) + repeats * value
    return total_s, parts


def _wave_time(
    spec: DeviceSpec, demand: _Demand, size: int, clock_mhz: float
) -> tuple[float, dict[str, float]]:
    """Seconds of one wave of ``size`` blocks, and how long each unit alone would take."""
    hertz, launch = clock_mhz * 1e6, demand.launch
    on_one = math.ceil(size / spec.sms)
    share = size / launch.blocks
    causes = {f"{name}_s": on_one * clocks / hertz for name, clocks in demand.pipe_clocks.items()}
    load_store_s = causes["load_store_s"]
    compute_s = max(value for name, value in causes.items() if name != "load_store_s")
    causes["l2_s"] = share * demand.l2_bytes / (spec.l2_bytes_per_clock * hertz)
    causes["dram_s"] = share * demand.dram_bytes / (spec.dram_bytes_per_s * spec.dram_efficiency)
    causes["chain_s"] = demand.chain_clocks / hertz
    causes["wait_s"] = demand.wait_clocks / hertz + demand.wait_s
    busy_s = _norm(compute_s, load_store_s, causes["l2_s"], causes["dram_s"], causes["chain_s"])
    others = on_one if launch.barriers_per_block else on_one * launch.warps_per_block
    hidden_s = busy_s if launch.pipeline_stages > 1 else busy_s * (1 - 1 / others)
    return busy_s + _norm(causes["wait_s"], hidden_s) - hidden_s, causes


def _norm(*values: float) -> float:
    total = sum(value**_OVERLAP_EXPONENT for value in values)
    return float(total ** (1 / _OVERLAP_EXPONENT))


def _unexplained(spec: DeviceSpec, work: KernelWork, seed: int) -> tuple[float, float]:
    """Factors on time and dynamic energy, the same for the same kernel on the same card."""
    text = f"{spec.name}/{seed}/{work.digest}"
    first, second = struct.unpack("<QQ", hashlib.sha256(text.encode()).digest()[:16])
    normal = NormalDist()
    z_time, z_energy = (normal.inv_cdf((value + 0.5) / 2**64) for value in (first, second))
    return math.exp(TIME_SPREAD * (2 + _clip(z_time))), math.exp(ENERGY_SPREAD * _clip(z_energy))


def _clip(z: float) -> float:
    return max(-2.0, min(2.0, z))
