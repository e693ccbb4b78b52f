"""Run by `test_contract.py` in a process that loads the stand-in ``libnvidia-ml.so.1``."""

from __future__ import annotations

from nvml_standin.sleep_load import SleepLoad

from tvm_energy.measurement import MeasurementPlan
from tvm_energy.meters.base import Load, PowerMeter
from tvm_energy.meters.nvml import open_nvml_meter
from tvm_energy.testing import MeterContract


class TestNvmlOnTheStandin(MeterContract):
    expected_power_w = 180.0
    plan = MeasurementPlan(warmup_s=0.1, window_s=0.2, budget_s=5.0)

    def open_meter(self) -> PowerMeter:
        return open_nvml_meter()

    def make_load(self, meter: PowerMeter) -> Load:
        return SleepLoad(2e-3)

    def break_sensor(self, meter: PowerMeter) -> bool:
        meter.close()  # the library is shut down: every reading is refused
        return True
