"""Record files like those of real runs, for the tests of everything that reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.records import (
    CandidateRecord,
    ClockRecord,
    FinalRecord,
    Header,
    Record,
    RecordLog,
    RoundRecord,
    TaskRecord,
)


def header(
    device: str = "sim:a100",
    objective: str = "energy:slack=0.05",
    *,
    simulated: bool = True,
    meter: dict[str, Any] | str | None = "simulated",
    plan: dict[str, Any] | None = None,
    clocks: dict[str, Any] | None = None,
) -> Header:
    info = {"meter": "simulated", "max_power_w": 400.0, "simulated": simulated}
    return Header(
        device={
            "name": f"Simulated {device}" if simulated else device,
            "uuid": device,
            "simulated": simulated,
        },
        meter=info if isinstance(meter, str) else meter,
        objective=objective,
        policy="snr",
        plan=plan or {"window_s": 1.0},
        versions={"tvm_energy": "0.1.0", "apache-tvm": "0.27.0.post1"},
        seed=7,
        created=1_700_000_000.0,
        clocks=clocks,
    )


def measurement(
    energy_j: float,
    latency_s: float,
    *,
    relative_stderr: float = 0.001,
    simulated: bool = True,
    **changes: Any,
) -> EnergyMeasurement:
    values = {
        "energy_j": energy_j,
        "stderr_j": relative_stderr * energy_j,
        "latency_s": latency_s,
        "launches": 1000,
        "windows": 2,
        "window_s": 2.0,
        "sensor_updates": 20,
        "method": "counter",
        "meter": "simulated" if simulated else "nvml",
        "scope": "gpu",
        "clock_mhz": 1410.0,
        "temperature_c": 55.0,
        "throttle_reasons": ("sw_power_cap",),
        "device_s": 3.0,
        "simulated": simulated,
    }
    return EnergyMeasurement(**(values | changes))


def candidate(
    key: str,
    latency_s: float | None,
    energy_j: float | None = None,
    *,
    workload: str = "w0",
    predicted_energy_j: float | None = None,
    error: str | None = None,
    round: int = 0,
    **measurement_changes: Any,
) -> CandidateRecord:
    measured = None
    if energy_j is not None and latency_s is not None:
        measured = measurement(energy_j, latency_s, **measurement_changes)
    return CandidateRecord(
        workload=workload,
        key=key,
        module=f"m{key}",
        round=round,
        latency_s=latency_s,
        measured=measured,
        predicted_energy_j=predicted_energy_j,
        predicted_stderr_j=None if predicted_energy_j is None else 0.1 * predicted_energy_j,
        error=error,
    )


def final(
    key: str,
    latency_s: float,
    energy_j: float,
    candidates: int,
    *,
    workload: str = "w0",
    **changes: Any,
) -> FinalRecord:
    return FinalRecord(
        workload=workload,
        key=key,
        measured=measurement(energy_j, latency_s, **changes),
        candidates=candidates,
    )


def at_clock(
    key: str,
    clock_mhz: float,
    latency_s: float,
    energy_j: float,
    *,
    workload: str = "w0",
    confirmed: bool = False,
    **changes: Any,
) -> ClockRecord:
    values = {"clock_mhz": clock_mhz} | changes
    return ClockRecord(
        workload=workload,
        key=key,
        clock_mhz=clock_mhz,
        measured=measurement(energy_j, latency_s, **values),
        confirmed=confirmed,
    )


def round_record(workload: str = "w0", **changes: Any) -> RoundRecord:
    values: dict[str, Any] = {
        "workload": workload,
        "round": 0,
        "candidates": 4,
        "gated": 3,
        "measured": 2,
        "policy_state": {"k": 1.0},
        "best_latency_s": 1e-3,
        "best_cost": 0.2,
        "seconds": {"learn": 0.1},
    }
    return RoundRecord(**(values | changes))


def two_tasks() -> list[Record]:
    """A finished run: a convolution that is called three times, a matmul, and one that never ran.

    The convolution's `b` is 4 % slower than the fastest, `a`, and takes 25 % less energy; `c` takes
    less still, but is too slow; `d` was only predicted, `e` failed. The matmul's fastest is its best.
    """
    return [
        header(),
        TaskRecord(task="fused_conv2d_add_relu", workload="w0", weight=3.0),
        TaskRecord(task="matmul", workload="w1"),
        TaskRecord(task="broken", workload="w2"),
        candidate("a", 1.00e-3, 0.200),
        candidate("b", 1.04e-3, 0.150, predicted_energy_j=0.16),
        candidate("c", 1.20e-3, 0.120),
        candidate("d", 1.03e-3, predicted_energy_j=0.18),
        candidate("e", None, error="build: TypeError: no such thing\nlong traceback"),
        round_record(),
        candidate("p", 2.0e-6, 3.0e-4, workload="w1"),
        candidate("q", 2.1e-6, 3.3e-4, workload="w1"),
        round_record("w1"),
        candidate("x", None, workload="w2", error="run: timeout: killed after 60 s"),
        candidate("y", None, workload="w2", error="run: timeout: killed after 60 s"),
    ]


def write_log(work_dir: Path, records: Iterable[Record]) -> Path:
    """Write a record file the way a run does."""
    work_dir.mkdir(parents=True, exist_ok=True)
    with RecordLog(work_dir) as log:
        for record in records:
            log.append(record)
    return log.path
