"""Every meter of this package passes the public contract; meters that are wrong do not."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_zeus import FakeDevices, FakeGpus
from nvml_standin import TESTS
from test_rapl import CpuLoad, Powercap
from virtual_gpu import TRUE_SENSOR, ScriptedMeter, VirtualGpu, VirtualLoad
from wall_meter import BASE_W, FACTOR, WallMeter

from tvm_energy.errors import MeterUnavailable
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.meters.base import DeviceState, Load, PowerMeter, Reading
from tvm_energy.meters.nvml import open_nvml_meter
from tvm_energy.meters.rapl import open_rapl_meter
from tvm_energy.meters.zeus import open_zeus_meter
from tvm_energy.simulation.nvml import ADA_SENSOR, HOPPER_SENSOR, VOLTA_SENSOR, SensorSpec
from tvm_energy.testing import MeterContract

POWER_W = 170.0


class OnVirtualGpu(MeterContract):
    expected_power_w = POWER_W
    sensor: SensorSpec = TRUE_SENSOR
    field: str | None = None
    plan = MeasurementPlan(budget_s=20.0)

    def open_meter(self) -> PowerMeter:
        self.gpu = VirtualGpu(self.sensor)
        return open_nvml_meter(nvml=self.gpu.nvml, field=self.field)  # type: ignore[arg-type]

    def make_load(self, meter: PowerMeter) -> Load:
        return self.gpu.load(37e-6, POWER_W)

    def break_sensor(self, meter: PowerMeter) -> bool:
        self.gpu.nvml.nvmlShutdown()
        return True


class TestSimulatedA100(OnVirtualGpu):
    pass


class TestSimulatedA100Power(OnVirtualGpu):
    field = "instant"


class TestSimulatedHopper(OnVirtualGpu):
    sensor = dataclasses.replace(HOPPER_SENSOR)


class TestSimulatedAdaAverage(OnVirtualGpu):
    sensor = dataclasses.replace(ADA_SENSOR, gain=1.0, offset_w=0.0)
    field = "usage"


class TestSimulatedVolta(OnVirtualGpu):
    sensor = VOLTA_SENSOR


class TestWallMeter(MeterContract):
    """The fake that the tests of ``meter=`` use."""

    expected_power_w = BASE_W + FACTOR * POWER_W

    def open_meter(self) -> PowerMeter:
        self.gpu = VirtualGpu(TRUE_SENSOR)
        return WallMeter(self.gpu.timeline.cumulative_j, self.gpu.clock, simulated=True)

    def make_load(self, meter: PowerMeter) -> Load:
        return self.gpu.load(37e-6, POWER_W)


class TestRapl(MeterContract):
    expected_power_w = 95.0

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.root = tmp_path
        self.opened = 0

    def open_meter(self) -> PowerMeter:
        self.opened += 1
        self.powercap = Powercap(self.root / str(self.opened), range_uj=100_000_000)
        self.packages = [
            self.powercap.add(f"intel-rapl:{i}", f"package-{i}", 0.5, start_uj=95_000_000 * i)
            for i in range(2)
        ]
        return open_rapl_meter(root=self.powercap.root, time=self.powercap)

    def make_load(self, meter: PowerMeter) -> Load:
        return CpuLoad(self.powercap, 3e-4, 95.0)

    def break_sensor(self, meter: PowerMeter) -> bool:
        (self.packages[0] / "energy_uj").unlink()
        return True


class TestZeus(MeterContract):
    expected_power_w = POWER_W

    def open_meter(self) -> PowerMeter:
        self.card = VirtualGpu()
        self.gpus = FakeGpus(self.card)
        return open_zeus_meter(devices=FakeDevices(self.gpus), time=self.card.clock)

    def make_load(self, meter: PowerMeter) -> Load:
        return self.card.load(37e-6, POWER_W)

    def break_sensor(self, meter: PowerMeter) -> bool:
        self.gpus.lost = True
        return True


def test_nvml_on_the_standin_passes(standin_library: Path, tmp_path: Path) -> None:
    """The real module pynvml on the stand-in library, in real time, in a process of its own."""
    knobs = tmp_path / "knobs.txt"
    knobs.write_text("power -1 0 180\nperiod 0.02\n")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(standin_library),
        "NVML_STANDIN": str(knobs),
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    suite = TESTS / "meters" / "contract_on_standin.py"
    options = ["-q", "-p", "no:cacheprovider", "-n0", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(suite)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed" in done.stdout or "9 passed, 1 skipped" in done.stdout, done.stdout


# ---- the contract can fail ------------------------------------------------------------------------


def counted(card: VirtualGpu) -> Callable[[float], float]:
    return lambda t: math.floor(card.timeline.cumulative_j(math.floor(t * 50) / 50) * 1e3) / 1e3


class Wrong(MeterContract):
    """A good scripted meter, with something changed."""

    def __init__(self, change: Callable[[Any, VirtualGpu], None]) -> None:
        self.change = change

    def open_meter(self) -> PowerMeter:
        self.card = VirtualGpu()
        meter = ScriptedMeter(
            self.card.clock, energy_j=counted(self.card), update_period_s=0.02, max_power_w=400.0
        )
        self.change(meter, self.card)
        return meter

    def make_load(self, meter: PowerMeter) -> Load:
        return VirtualLoad(self.card, 37e-6, lambda _: POWER_W)


def info(**values: Any) -> Callable[[Any, VirtualGpu], None]:
    def change(meter: Any, card: VirtualGpu) -> None:
        meter.info = dataclasses.replace(meter.info, **values)

    return change


def reads(make: Callable[[float, float], Reading]) -> Callable[[Any, VirtualGpu], None]:
    """Readings made from the moment and the true value."""

    def change(meter: Any, card: VirtualGpu) -> None:
        def read() -> Reading:
            now_s = card.clock.now()
            card.clock.advance(2e-5)
            return make(now_s, counted(card)(now_s))

        meter.read = read

    return change


def state(value: Any) -> Callable[[Any, VirtualGpu], None]:
    def change(meter: Any, card: VirtualGpu) -> None:
        meter.state = lambda: value

    return change


WRONG: list[tuple[str, Callable[[Any, VirtualGpu], None]]] = [
    ("test_it_says_what_it_is", info(scope="")),
    ("test_it_says_what_it_is", info(method="guess")),
    ("test_it_says_what_it_is", info(update_period_s=math.nan)),
    ("test_it_says_what_it_is", info(resolution_j=None)),
    (
        "test_readings_carry_the_time_of_the_meters_clock",
        reads(lambda t, e: Reading(time_s=t - 5, energy_j=e)),
    ),
    ("test_a_reading_holds_what_the_method_says", reads(lambda t, e: Reading(time_s=t))),
    (
        "test_a_reading_holds_what_the_method_says",
        reads(lambda t, e: Reading(time_s=t, power_w=5.0)),
    ),
    (
        "test_a_reading_holds_what_the_method_says",
        reads(lambda t, e: Reading(time_s=t, energy_j=math.nan)),
    ),
    ("test_the_sensor_moves_under_load", reads(lambda t, e: Reading(time_s=t, energy_j=7.0))),
    ("test_the_sensor_moves_under_load", reads(lambda t, e: Reading(time_s=t, energy_j=1e6 - e))),
    ("test_the_update_period_is_the_true_one", info(update_period_s=0.05)),
    ("test_the_update_period_is_the_true_one", info(update_period_s=0.1)),
    ("test_power_is_plausible", info(max_power_w=60.0)),
    ("test_the_state_is_known_or_none", state(DeviceState(clock_mhz=0.0))),
    ("test_the_state_is_known_or_none", state(None)),
    ("test_a_kernel_is_measured", reads(lambda t, e: Reading(time_s=t, energy_j=0.0))),
    ("test_it_can_be_closed_twice_and_opened_again", lambda meter, _: setattr(meter, "close", [])),
]


@pytest.mark.parametrize(("test", "change"), WRONG)
def test_a_wrong_meter_fails(test: str, change: Callable[[Any, VirtualGpu], None]) -> None:
    getattr(Wrong(lambda *_: None), test)()  # the unchanged meter passes
    with pytest.raises(Exception) as caught:  # noqa: PT011  (an assertion, or what the meter raises)
        getattr(Wrong(change), test)()
    assert not isinstance(caught.value, pytest.skip.Exception)


def test_a_meter_with_the_wrong_power_fails() -> None:
    contract = Wrong(reads(lambda t, e: Reading(time_s=t, energy_j=0.9 * e)))
    contract.expected_power_w = POWER_W
    with pytest.raises(AssertionError, match="153 W measured, 170 W expected"):
        contract.test_a_kernel_is_measured()


class Broken(Wrong):
    def __init__(self, after: Callable[[], Reading]) -> None:
        super().__init__(lambda *_: None)
        self.after = after

    def break_sensor(self, meter: Any) -> bool:
        meter.read = self.after
        return True


def raises(error: Exception) -> Callable[[], Reading]:
    def read() -> Reading:
        raise error

    return read


def test_a_broken_sensor_must_say_so() -> None:
    Broken(
        raises(MeterUnavailable("the GPU fell off the bus; reboot"))
    ).test_a_broken_sensor_raises()
    with pytest.raises(AssertionError, match="gave Reading"):
        Broken(lambda: Reading(time_s=0.0, energy_j=0.0)).test_a_broken_sensor_raises()
    with pytest.raises(OSError, match="foreign"):
        Broken(raises(OSError("foreign"))).test_a_broken_sensor_raises()
    with pytest.raises(pytest.skip.Exception):
        Wrong(lambda *_: None).test_a_broken_sensor_raises()
