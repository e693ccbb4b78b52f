from __future__ import annotations

import sys
from typing import Any

import pytest
from fake_zeus import FakeDevices, FakeGpus, Jetson
from virtual_gpu import VirtualGpu

from tvm_energy.errors import MeasurementError, MeterUnavailable
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.meters.zeus import ZeusMeter, open_zeus_meter
from tvm_energy.protocol import measure


def opened(devices: FakeDevices, card: VirtualGpu, *args: Any, **kwargs: Any) -> ZeusMeter:
    return open_zeus_meter(*args, devices=devices, time=card.clock, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "method"),
    [
        ({}, "counter"),
        ({"counter": False}, "power_integral"),
        ({"counter": False, "instant": False}, "power_average"),
    ],
)
def test_an_amd_gpu(kwargs: dict[str, bool], method: str) -> None:
    card = VirtualGpu()
    meter = opened(FakeDevices(FakeGpus(card, **kwargs)), card)
    assert meter.info.meter == "zeus"
    assert meter.info.method == method
    assert meter.info.scope == "gpu"
    assert meter.info.device_name == "AMD Instinct 0"
    assert meter.info.max_power_w == pytest.approx(300.0)
    assert meter.info.update_period_s == pytest.approx(0.02, rel=0.2)
    assert meter.state().temperature_c == 48
    assert any(method in note for note in meter.info.notes) == (method != "counter")
    result = measure(card.load(37e-6, 180.0), meter, MeasurementPlan())
    assert result.energy_j == pytest.approx(37e-6 * 180, rel=0.01)
    assert result.meter == "zeus"


@pytest.mark.parametrize(
    ("total", "metric", "scope", "share"),
    [
        (True, None, "module", 1.0),
        (False, None, "gpu", 0.6),
        (True, "cpu_energy_mj", "cpu_energy", 0.2),
    ],
)
def test_a_jetson(total: bool, metric: str | None, scope: str, share: float) -> None:
    card = VirtualGpu(idle_power_w=4.0)
    devices = FakeDevices(None, Jetson(card, total=total))
    meter = opened(devices, card, metric=metric)  # no GPU that Zeus knows: the chip is taken
    assert meter.info.scope == scope
    assert meter.info.method == "counter"
    result = measure(card.load(1e-3, 15.0), meter, MeasurementPlan())
    assert result.energy_j == pytest.approx(share * 1e-3 * 15, rel=0.02)


def test_what_zeus_does_not_know_is_refused_with_a_next_step() -> None:
    card = VirtualGpu()
    with pytest.raises(MeterUnavailable, match="there is no GPU 3") as caught:
        opened(FakeDevices(FakeGpus(card, count=2)), card, "gpu", 3)
    assert "HIP_VISIBLE_DEVICES" in str(caught.value)
    with pytest.raises(MeterUnavailable, match=r"AMDSMI unavailable.*No observable SoC"):
        opened(FakeDevices(), card)
    with pytest.raises(MeterUnavailable, match="No observable SoC"):
        opened(FakeDevices(FakeGpus(card)), card, "soc")
    with pytest.raises(MeterUnavailable, match="ane_mj is not among"):
        opened(FakeDevices(None, Jetson(card)), card, metric="ane_mj")


def test_no_sensor_at_all() -> None:
    card = VirtualGpu()
    gpus = FakeGpus(card, counter=False)
    gpus.get_instant_power_usage = gpus.get_average_power_usage = gpus.get_total_energy_consumption  # type: ignore[method-assign]
    with pytest.raises(MeterUnavailable, match="no energy or power of AMD Instinct 0"):
        opened(FakeDevices(gpus), card, "gpu")


def test_a_lost_gpu_ends_the_meter() -> None:
    card = VirtualGpu()
    gpus = FakeGpus(card)
    meter = opened(FakeDevices(gpus), card)
    gpus.lost = True
    with pytest.raises(MeterUnavailable, match="ZeusGPULostError"):
        meter.read()
    assert meter.state().temperature_c == 48


def test_a_passing_error_costs_one_measurement() -> None:
    card = VirtualGpu()
    gpus = FakeGpus(card)
    meter = opened(FakeDevices(gpus), card)

    def busy() -> float:
        raise TimeoutError("amdsmi is busy")

    gpus._now = busy  # type: ignore[method-assign]
    with pytest.raises(MeasurementError, match="TimeoutError: amdsmi is busy"):
        measure(card.load(1e-3, 100.0), meter, MeasurementPlan())


def test_a_counter_that_stands_still_is_no_meter() -> None:
    card = VirtualGpu()
    gpus = FakeGpus(card)
    gpus.period_s = 1e9
    with pytest.raises(MeterUnavailable, match="does not move"):
        opened(FakeDevices(gpus), card)


def test_zeus_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeus", None)
    monkeypatch.setitem(sys.modules, "zeus.device", None)
    with pytest.raises(MeterUnavailable, match=r"pip install 'tvm-energy\[zeus\]'"):
        open_zeus_meter()


def test_misuse() -> None:
    with pytest.raises(ValueError, match="kind must be"):
        open_zeus_meter("cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="index must not be negative"):
        open_zeus_meter(index=-1)
