"""The simulated GPUs: published figures, and energies calibrated on public measurements.

Every constant names its source in the comment beside it:

    [ds]    the vendor's data sheet or architecture white paper of the part
    [mb]    what published micro-benchmarks report, rounded (Abdelkhalik et al., arXiv:2208.11174 for
            Ampere; Luo et al., arXiv:2402.13499 for Hopper, Ada and Ampere)
    [kt]    fitted by us to the power-over-clock table of an A100-PCIE-40GB in KernelTuner's
            kernel_tuner_tutorial (energy/data), Apache-2.0
    [ai]    fitted by us to H200 rows of ai-dynamo/aiconfigurator, Apache-2.0
    [sys]   the list of clocks that the driver of the board offers in sysfs (``available_frequencies``),
            as scripts in public repositories print it
    [isscc] Horowitz, "Computing's energy problem", ISSCC 2014, scaled to the process (estimate)
    [est]   our estimate; the comment says how

Figures marked [ds], [mb] and the pJ/bit of DRAM were written down from general knowledge of these
sources and not compared with their text; only the [kt], [ai] and [sys] data were at hand, and of the Jetson
boards' data sheets cores, clocks and memory.

Energies are joules at the *reference* voltage, that of the highest clock, and scale with voltage
squared; DRAM has a supply of its own and does not scale.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MappingProxyType

from tvm_energy.errors import ConfigurationError

PICO = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyTable:
    """Dynamic energy of one event, joules at the reference voltage.

    Attributes:
        issue_j: fetching, decoding and scheduling one warp instruction.
        fma32_j, fp32_j, fp16_j, fp64_j, integer_j, special_j: one thread's operation, its operands'
            trip from and to the register file included.
        tensor_flop_j: one floating-point operation in a tensor core (float16 in, float32 sum).
        sm_clock_j: one clock of one busy multiprocessor: clock tree and idle pipelines.
        shared_wavefront_j: one pass through the banks of shared memory.
        shared_byte_j: one byte delivered to or from a thread through shared memory.
        l1_sector_j: one 32-byte sector read from or written through L1.
        l2_byte_j: one byte between L2 and a multiprocessor, the way across the chip included.
        dram_byte_j: one byte to or from DRAM, its controller and wires included.
    """

    issue_j: float
    fma32_j: float
    fp32_j: float
    fp16_j: float
    fp64_j: float
    integer_j: float
    special_j: float
    tensor_flop_j: float
    sm_clock_j: float
    shared_wavefront_j: float
    shared_byte_j: float
    l1_sector_j: float
    l2_byte_j: float
    dram_byte_j: float

    def scaled(self, factor: float) -> EnergyTable:
        """The same events in another process: everything times ``factor``, DRAM left alone."""
        values = {name: factor * getattr(self, name) for name in self.__dataclass_fields__}
        return EnergyTable(**{**values, "dram_byte_j": self.dram_byte_j})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A GPU as the simulation knows it.

    Attributes:
        name: what follows ``sim:`` on the command line.
        full_name: the exact part.
        target: TVM target, a tag or a JSON object.
        sms: multiprocessors.
        schedulers: warp schedulers of one; each issues one warp instruction a clock.
        fp32_lanes, int_lanes, fp16_lanes, fp64_lanes, special_lanes: operations of that kind that one
            multiprocessor finishes a clock.
        tensor_flops_per_clock: of one multiprocessor, dense float16.
        registers_per_sm, max_threads_per_sm, max_blocks_per_sm: limits of residency.
        max_registers_per_thread: beyond it the compiler spills.
        l1_bytes: L1 cache and shared memory of one multiprocessor, together.
        max_shared_bytes_per_sm: largest part of it that can be shared memory.
        max_shared_bytes_per_block: what a kernel may declare statically.
        l2_bytes: size of L2.
        l2_bytes_per_clock: from L2 to all multiprocessors together.
        dram_bytes_per_s: peak; ``dram_efficiency`` of it is reached.
        alu_latency_clocks, shared_latency_clocks, l2_latency_clocks, dram_latency_s: from issue to use.
        launch_gap_s: from the end of one kernel to the start of the next in one stream.
        min_clock_mhz, max_clock_mhz, clock_step_mhz: core clocks that can be locked.
        listed_clocks_mhz: these clocks where their steps are uneven, ascending; else empty.
        ridge_clock_mhz: up to here the voltage is lowest and constant.
        voltage_ratio: voltage at the highest clock over the lowest voltage.
        power_limit_w: enforced power limit; the clock falls until the power fits.
        idle_power_w: no kernel, context open.
        constant_power_w: board, fans, memory standby, while a kernel runs.
        static_power_w: leakage at the reference voltage and 60 degrees, all multiprocessors busy.
        gated_static_share: part of the leakage that only busy multiprocessors have.
        leakage_per_c: relative change of leakage by one degree.
        thermal_resistance_c_per_w, thermal_time_constant_s, ambient_c: first-order thermal model.
        energy: dynamic energies.
    """

    name: str
    full_name: str
    target: str
    sms: int
    schedulers: int = 4
    fp32_lanes: int
    int_lanes: int
    fp16_lanes: int
    fp64_lanes: int
    special_lanes: int = 16
    tensor_flops_per_clock: int
    registers_per_sm: int = 65536
    max_registers_per_thread: int = 255
    max_threads_per_sm: int
    max_blocks_per_sm: int
    l1_bytes: int
    max_shared_bytes_per_sm: int
    max_shared_bytes_per_block: int = 49152
    l2_bytes: int
    l2_bytes_per_clock: float
    dram_bytes_per_s: float
    dram_efficiency: float = 0.92
    alu_latency_clocks: float = 4.0
    shared_latency_clocks: float
    l2_latency_clocks: float
    dram_latency_s: float
    launch_gap_s: float
    min_clock_mhz: float
    max_clock_mhz: float
    clock_step_mhz: float = 15.0
    listed_clocks_mhz: tuple[float, ...] = ()
    ridge_clock_mhz: float
    voltage_ratio: float
    power_limit_w: float
    idle_power_w: float
    constant_power_w: float
    static_power_w: float
    gated_static_share: float = 0.5
    leakage_per_c: float = 0.006
    thermal_resistance_c_per_w: float
    thermal_time_constant_s: float
    ambient_c: float = 30.0
    energy: EnergyTable

    def voltage(self, clock_mhz: float) -> float:
        """Core voltage over the reference voltage (1 at the highest clock).

        Flat up to the ridge, then linear, as Schoonhoven et al. ("Going green", arXiv:2211.07260)
        measured it.
        """
        above = max(0.0, clock_mhz - self.ridge_clock_mhz)
        rise = (self.voltage_ratio - 1) * above / (self.max_clock_mhz - self.ridge_clock_mhz)
        return (1 + rise) / self.voltage_ratio

    @property
    def clocks_mhz(self) -> tuple[float, ...]:
        """Core clocks that can be locked, ascending."""
        if self.listed_clocks_mhz:
            return self.listed_clocks_mhz
        steps = round((self.max_clock_mhz - self.min_clock_mhz) / self.clock_step_mhz)
        return tuple(self.min_clock_mhz + i * self.clock_step_mhz for i in range(steps + 1))

    def nearest_clock_mhz(self, clock_mhz: float) -> float:
        """The supported clock nearest to ``clock_mhz``."""
        return min(self.clocks_mhz, key=lambda clock: abs(clock - clock_mhz))


# GA100 in 7 nm. The sum sm_clock + 2 issue + 64 fma (one clock of FMAs at full rate) is what [kt]
# fixes; how it divides among the three follows the shares that AccelWattch (Kandiah et al.,
# MICRO'21) gives for Volta [est].
_GA100_ENERGY = EnergyTable(
    issue_j=34 * PICO,  # [kt] share
    fma32_j=8.35 * PICO,  # [kt] share; arithmetic alone about 1.5 pJ [isscc], the rest is operands
    fp32_j=6.2 * PICO,  # [est] two operands instead of three, adder or multiplier alone
    fp16_j=4.6 * PICO,  # [est] fp32 x 0.75: half the bits, same register file access
    fp64_j=24
    * PICO,  # [est] H100 FP64 FMA 13.7 pJ (ESiWACE3 slides), one process older, with operands
    integer_j=5.0 * PICO,  # [est] fp32 x 0.8; the adder itself is 0.1 pJ [isscc]
    special_j=20 * PICO,  # [est] table look-up and two multiply-adds
    tensor_flop_j=0.70
    * PICO,  # [est] 312 TFLOP/s would take 218 W: tensor kernels reach the 250 W cap
    sm_clock_j=105 * PICO,  # [kt] share
    # [est] 32 banks of 4 bytes out of 192 KiB: 10 to 20 pJ for 8 bytes [isscc], scaled; then the crossbar
    # and the register file. Together with L1 and L2 raised by a third to a half after a look at the
    # power of simulated TVM products (176 W before), which we hold to be low beside the 153 W of
    # [kt], whose operands never leave the registers. No measurement was found to check that.
    shared_wavefront_j=100 * PICO,
    shared_byte_j=0.6 * PICO,
    l1_sector_j=60 * PICO,  # [est] shared memory's cost for 32 bytes, and the tags
    l2_byte_j=14 * PICO,  # 294 pJ for 32 bytes over 10 mm (ESiWACE3 slides); 15 mm of the die [est]
    dram_byte_j=58
    * PICO,  # HBM2 3.9 pJ/bit (O'Connor et al., MICRO'17), x 1.85 for PHY, controller [est]
)

A100 = DeviceSpec(
    name="a100",
    full_name="NVIDIA A100-PCIE-40GB",
    target="nvidia/nvidia-a100",
    sms=108,  # [ds]
    fp32_lanes=64,  # [ds] 19.5 TFLOP/s at 1410 MHz
    int_lanes=64,  # [ds]
    fp16_lanes=256,  # [ds] 78 TFLOP/s outside of tensor cores
    fp64_lanes=32,  # [ds]
    tensor_flops_per_clock=2048,  # [ds] 312 TFLOP/s
    max_threads_per_sm=2048,  # [ds]
    max_blocks_per_sm=32,  # [ds]
    l1_bytes=192 * 1024,  # [ds]
    max_shared_bytes_per_sm=164 * 1024,  # [ds]
    l2_bytes=40 * 1024 * 1024,  # [ds]
    l2_bytes_per_clock=5120 * 0.7,  # [ds] 5120 B/clock, of which about 0.7 is reached [mb]
    dram_bytes_per_s=1555e9,  # [ds]
    shared_latency_clocks=23,  # [mb]
    l2_latency_clocks=200,  # [mb]
    dram_latency_s=190e-9,  # [mb] 466 clocks at 1410 MHz in all, what L2 takes left out
    launch_gap_s=1.1e-6,  # [est] back-to-back kernels of one stream take about 1 to 1.5 us
    min_clock_mhz=210,  # [kt]
    max_clock_mhz=1410,  # [ds]
    ridge_clock_mhz=1025,  # measured, Schoonhoven et al., arXiv:2211.07260
    voltage_ratio=1.32,  # [kt]
    power_limit_w=250,  # [ds]
    idle_power_w=33,  # [est] the power that [kt] extrapolates to at zero clock, rounded
    constant_power_w=22,  # [kt] together with static_power_w
    static_power_w=20,  # [kt] 11 W at the lowest voltage
    thermal_resistance_c_per_w=0.16,  # [est] about 70 degrees at 250 W
    thermal_time_constant_s=25,  # [est] passive heat sink in a server's air stream
    energy=_GA100_ENERGY,
)

# AD102 and GH100 in TSMC 4N. Per-event energies at their (higher) clocks: 7 nm to 5 nm class saves
# about 30 % at equal speed (TSMC), of which a part goes into the clock [est].
RTX4090 = DeviceSpec(
    name="rtx4090",
    full_name="NVIDIA GeForce RTX 4090",
    target="nvidia/geforce-rtx-4090",
    sms=128,  # [ds]
    fp32_lanes=128,  # [ds] 82.6 TFLOP/s at 2520 MHz
    int_lanes=64,  # [ds]
    fp16_lanes=128,  # [ds]
    fp64_lanes=2,  # [ds]
    tensor_flops_per_clock=512,  # [ds] 165 TFLOP/s with float32 sums (twice that with float16 sums)
    max_threads_per_sm=1536,  # [ds]
    max_blocks_per_sm=24,  # [ds]
    l1_bytes=128 * 1024,  # [ds]
    max_shared_bytes_per_sm=100 * 1024,  # [ds]
    l2_bytes=72 * 1024 * 1024,  # [ds]
    l2_bytes_per_clock=2100,  # [mb] about 5 TB/s at boost
    dram_bytes_per_s=1008e9,  # [ds]
    shared_latency_clocks=24,  # [mb]
    l2_latency_clocks=260,  # [mb]
    dram_latency_s=170e-9,  # [mb]
    launch_gap_s=1.0e-6,  # [est] as for the A100
    min_clock_mhz=210,  # [ds]
    max_clock_mhz=2520,  # [ds] boost clock; cards go higher while cool
    ridge_clock_mhz=1815,  # [est] 0.72 of the boost clock, the share measured on an RTX A4000 (2211.07260)
    voltage_ratio=1.25,  # [est] about 0.88 V to 1.1 V
    power_limit_w=450,  # [ds]
    idle_power_w=55,  # [est] context open, memory at full clock
    constant_power_w=42,  # [est] board, fans and GDDR6X standby
    static_power_w=48,  # [est] leakage of 76e9 transistors at 1.05 V
    thermal_resistance_c_per_w=0.095,  # [est] about 72 degrees at 450 W
    thermal_time_constant_s=40,  # [est] large vapour chamber
    energy=EnergyTable(
        **{
            name: getattr(_GA100_ENERGY.scaled(0.62), name)
            for name in EnergyTable.__dataclass_fields__
            if name not in ("dram_byte_j", "tensor_flop_j")
        },
        tensor_flop_j=1.0
        * PICO,  # [est] tensor kernels come near the power limit, as on other cards
        dram_byte_j=74 * PICO,  # GDDR6X 7.25 pJ/bit (Micron), x 1.28 for PHY and controller [est]
    ),
)

H200 = DeviceSpec(
    name="h200",
    full_name="NVIDIA H200 SXM 141GB",
    # No tag of TVM's names this part.
    target=(
        '{"kind": "cuda", "arch": "sm_90", "max_num_threads": 1024, "max_threads_per_block": 1024, '
        '"max_shared_memory_per_block": 49152, "registers_per_block": 65536, '
        '"thread_warp_size": 32, "l2_cache_size_bytes": 52428800}'
    ),
    sms=132,  # [ds]
    fp32_lanes=128,  # [ds] 67 TFLOP/s at 1980 MHz
    int_lanes=64,  # [ds]
    fp16_lanes=256,  # [ds]
    fp64_lanes=64,  # [ds]
    tensor_flops_per_clock=4096,  # [ds] 989 TFLOP/s at 1830 MHz
    max_threads_per_sm=2048,  # [ds]
    max_blocks_per_sm=32,  # [ds]
    l1_bytes=256 * 1024,  # [ds]
    max_shared_bytes_per_sm=228 * 1024,  # [ds]
    l2_bytes=50 * 1024 * 1024,  # [ds]
    l2_bytes_per_clock=3600,  # [mb] about 7 TB/s at boost
    dram_bytes_per_s=4800e9,  # [ds]
    dram_efficiency=0.90,  # [ai] best streaming rows 4.2 to 4.3 TB/s
    shared_latency_clocks=29,  # [mb]
    l2_latency_clocks=260,  # [mb]
    dram_latency_s=250e-9,  # [mb] measured on an H100
    launch_gap_s=1.0e-6,  # [est] as for the A100
    min_clock_mhz=345,  # [ds] lowest clock of the Hopper table
    max_clock_mhz=1980,  # [ds]
    ridge_clock_mhz=1410,  # [est] 0.71 of the highest clock, between A100 and A4000 (2211.07260)
    voltage_ratio=1.30,  # [est]
    power_limit_w=700,  # [ds]
    idle_power_w=115,  # [ai] the least power of any row is 126 W, with the GPU nearly idle
    constant_power_w=88,  # [ai] together with static_power_w
    static_power_w=62,  # [ai]
    thermal_resistance_c_per_w=0.06,  # [est] about 70 degrees at 700 W
    thermal_time_constant_s=20,  # [est]
    energy=EnergyTable(
        **{
            name: getattr(_GA100_ENERGY.scaled(0.78), name)
            for name in EnergyTable.__dataclass_fields__
            if name not in ("dram_byte_j", "tensor_flop_j", "l2_byte_j")
        },
        tensor_flop_j=0.55 * PICO,  # [ai] large GEMMs: 600-700 TFLOP/s at about 690 W
        l2_byte_j=13.0 * PICO,  # [ai] longer way than in the A100: two partitions
        dram_byte_j=82 * PICO,  # [ai] memory-bound rows: about 105 pJ/byte from DRAM to registers
    ),
)

# The two Jetson boards of arXiv:2502.06295. Power is that of the whole module: the GPU shares supply and
# memory with the CPU, and the board's sensor sees them together.
ORIN_NANO = DeviceSpec(
    name="orin-nano",
    full_name="NVIDIA Jetson Orin Nano 8GB (Super, 25 W)",
    # TVM's tag names an ARM host, which cross-compiles; nothing runs here, so the host is left out.
    target=(
        '{"kind": "cuda", "arch": "sm_87", "max_num_threads": 1024, "max_threads_per_block": 1024, '
        '"max_shared_memory_per_block": 49152, "registers_per_block": 65536, '
        '"thread_warp_size": 32, "l2_cache_size_bytes": 2097152}'
    ),
    sms=8,  # [ds] 1024 cores
    fp32_lanes=128,  # [ds]
    int_lanes=64,  # [ds] as in other Ampere chips
    fp16_lanes=256,  # [ds]
    fp64_lanes=2,  # [ds]
    tensor_flops_per_clock=2048,  # [ds] 67 TOP/s sparse int8 is 17 TFLOP/s dense float16
    max_threads_per_sm=1536,  # [ds]
    max_blocks_per_sm=16,  # [ds]
    l1_bytes=192 * 1024,  # [ds]
    max_shared_bytes_per_sm=164 * 1024,  # [ds]
    l2_bytes=2 * 1024 * 1024,  # [ds]
    l2_bytes_per_clock=360,  # [est] 64 B/clock for each multiprocessor, 0.7 of it reached
    dram_bytes_per_s=102.4e9,  # [ds] 128-bit LPDDR5 at 3200 MHz
    dram_efficiency=0.85,  # [est] shared with the CPU
    shared_latency_clocks=23,  # [est] as the A100
    l2_latency_clocks=190,  # [est] as the A100, smaller chip
    dram_latency_s=350e-9,  # [est] LPDDR5 behind the memory controller of the whole chip
    launch_gap_s=2.5e-6,  # [est] twice a server's: slower CPU, one memory
    min_clock_mhz=306,  # [sys]
    max_clock_mhz=1020,  # [sys] [ds]
    listed_clocks_mhz=(306, 408, 510, 612, 714, 816, 918, 1020),  # [sys]
    ridge_clock_mhz=714,  # [est] 0.70 of the highest clock, as measured on an A100 (2211.07260)
    voltage_ratio=1.35,  # [est] about 0.65 V to 0.88 V
    power_limit_w=25,  # [ds] highest power mode
    idle_power_w=5.0,  # [est] board idle, between 4 W and 6 W
    constant_power_w=4.3,  # [est] board, CPU and memory controller
    static_power_w=1.5,  # [est] leakage of one graphics cluster
    thermal_resistance_c_per_w=1.9,  # [est] about 75 degrees at 25 W
    thermal_time_constant_s=60,  # [est] small heat sink with a fan
    energy=EnergyTable(
        **{
            name: getattr(_GA100_ENERGY.scaled(0.75), name)
            for name in EnergyTable.__dataclass_fields__
            if name not in ("dram_byte_j",)
        },  # [est] 8 nm at 0.88 V against 7 nm at 1.05 V
        dram_byte_j=46 * PICO,  # [est] LPDDR5 4 pJ/bit, x 1.4 for PHY and controller
    ),
)

XAVIER_NX = DeviceSpec(
    name="xavier-nx",
    full_name="NVIDIA Jetson Xavier NX 8GB (20 W)",
    # TVM has no tag for this board.
    target=(
        '{"kind": "cuda", "arch": "sm_72", "max_num_threads": 1024, "max_threads_per_block": 1024, '
        '"max_shared_memory_per_block": 49152, "registers_per_block": 65536, '
        '"thread_warp_size": 32, "l2_cache_size_bytes": 524288}'
    ),
    sms=6,  # [ds] 384 cores
    fp32_lanes=64,  # [ds]
    int_lanes=64,  # [ds]
    fp16_lanes=128,  # [ds]
    fp64_lanes=32,  # [ds]
    tensor_flops_per_clock=1024,  # [ds] 48 tensor cores
    max_threads_per_sm=2048,  # [ds]
    max_blocks_per_sm=32,  # [ds]
    l1_bytes=128 * 1024,  # [ds]
    max_shared_bytes_per_sm=96 * 1024,  # [ds]
    l2_bytes=512 * 1024,  # [ds]
    l2_bytes_per_clock=270,  # [est] 64 B/clock for each multiprocessor, 0.7 of it reached
    dram_bytes_per_s=51.2e9,  # [ds] 128-bit LPDDR4x at 1600 MHz
    dram_efficiency=0.85,  # [est] shared with the CPU
    shared_latency_clocks=19,  # [mb] Volta
    l2_latency_clocks=190,  # [mb] Volta, rounded
    dram_latency_s=350e-9,  # [est] as the Orin Nano
    launch_gap_s=3.0e-6,  # [est] slower CPU than the Orin Nano's
    min_clock_mhz=114.75,  # [sys]
    max_clock_mhz=1109.25,  # [sys] [ds]
    # [sys]
    listed_clocks_mhz=(
        *(114.75, 204, 306, 408, 510, 599.25, 701.25, 752.25, 803.25, 854.25),
        *(905.25, 956.25, 1007.25, 1058.25, 1109.25),
    ),
    ridge_clock_mhz=752.25,  # [est] 0.68 of the highest clock, as measured on an A100 (2211.07260)
    voltage_ratio=1.4,  # [est] about 0.65 V to 0.9 V
    power_limit_w=20,  # [ds] highest power mode
    idle_power_w=4.0,  # [est] board idle
    constant_power_w=3.5,  # [est] board, CPU and memory controller
    static_power_w=1.4,  # [est]
    thermal_resistance_c_per_w=2.2,  # [est] about 74 degrees at 20 W
    thermal_time_constant_s=60,  # [est] small heat sink with a fan
    energy=EnergyTable(
        **{
            name: getattr(_GA100_ENERGY.scaled(1.2), name)
            for name in EnergyTable.__dataclass_fields__
            if name not in ("dram_byte_j",)
        },  # [est] 12 nm at 0.9 V against 7 nm at 1.05 V
        dram_byte_j=58 * PICO,  # [est] LPDDR4x 5 pJ/bit, x 1.4 for PHY and controller
    ),
)

#: Every simulated device by name.
DEVICES = MappingProxyType(
    {spec.name: spec for spec in (A100, RTX4090, H200, ORIN_NANO, XAVIER_NX)}
)


def find_device(name: str) -> DeviceSpec:
    """The device of that name; ``sim:`` in front is allowed.

    Raises:
        ConfigurationError: unknown name; the message lists the known ones.
    """
    key = name.strip().lower().removeprefix("sim:")
    try:
        return DEVICES[key]
    except KeyError:
        close = difflib.get_close_matches(key, DEVICES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigurationError(
            f"simulated device {name!r} is not known; use one of {', '.join(DEVICES)}{hint}"
        ) from None
