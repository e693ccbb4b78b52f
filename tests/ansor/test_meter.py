"""``meter=`` of `tvm_energy.ansor.tune`; what it takes is tested on the side of MetaSchedule."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import pytest
from conftest import MATMUL, SMALL_SEARCH, trials
from wall_meter import BASE_W, FACTOR, WallMeter

from tvm_energy import ansor
from tvm_energy.errors import ConfigurationError
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.records import FILE_NAME, CandidateRecord, read_records

# Workers cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules["wall_meter"])


def measured(work_dir: Path, task, **arguments) -> list:
    ansor.tune(
        task,
        trials(2, 2),
        work_dir=work_dir,
        policy="all",
        objective="energy",
        search_policy_params=SMALL_SEARCH,
        finalists=0,
        seed=1,
        **arguments,
    )
    records = list(read_records(work_dir / FILE_NAME))
    assert records[0].meter["device_name"] == "rack 7"
    found = [r.measured for r in records if isinstance(r, CandidateRecord) and r.measured]
    assert found
    assert {item.meter for item in found} == {"wall"}
    return found


def test_another_meter_than_the_simulated_card_has(tmp_path: Path) -> None:
    device = ansor.open_device("sim:a100")
    meter = WallMeter(device.gpu.timeline.cumulative_j, device.gpu.clock, simulated=True)
    task = ansor.workload_task(MATMUL, device="sim:a100")
    try:
        for item in measured(tmp_path, task, device=device, meter=meter):
            assert item.simulated
            limit_w = device.gpu.spec.power_limit_w
            assert BASE_W + 20 * FACTOR < item.power_w < BASE_W + FACTOR * limit_w
    finally:
        device.close()


def test_a_meter_on_this_cpu_works_in_the_worker(tmp_path: Path) -> None:
    """Energy can be tuned for where the processor's own meter cannot be read."""
    task = ansor.workload_task(MATMUL, device="cpu")
    plan = MeasurementPlan(window_s=0.2)
    found = measured(tmp_path, task, device="cpu", meter=WallMeter, plan=plan)
    assert not any(item.simulated for item in found)
    assert all(item.energy_j > 0 for item in found)


def test_a_meter_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    task = ansor.workload_task(MATMUL, device="sim:a100")
    with pytest.raises(ConfigurationError, match="has a simulated sensor of its own"):
        ansor.tune(task, trials(2, 2), work_dir=tmp_path, device="sim:a100", meter="nvml")
