"""The code of docs/extending.md runs, and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_session import TASK, Kernels

from tvm_energy.energy_model.xgb import XgbKernelModel
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.protocol import measure
from tvm_energy.session import Session

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"


@pytest.fixture(scope="module")
def page() -> dict[str, object]:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        assert block.count("\n") < 32
        exec(compile(block, str(PAGE), "exec"), names)
    return names


class VirtualTime:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class BlockingLoad:
    """Takes a millisecond a launch."""

    def __init__(self, time: VirtualTime) -> None:
        self.time = time

    def enqueue(self, launches: int) -> None:
        self.time.sleep(1e-3 * launches)

    def synchronize(self) -> None:
        pass


def test_the_meter_measures(page) -> None:
    time = VirtualTime()
    meter = page["PduMeter"](lambda: float(int(200 * (time.now() // 0.5) * 0.5)), "rack", 0.5)
    meter.time = time
    result = measure(BlockingLoad(time), meter, MeasurementPlan(window_s=10.0, budget_s=60.0))
    assert result.meter == "pdu"
    assert result.energy_j == pytest.approx(0.2, rel=0.05)
    assert abs(result.energy_j - 0.2) <= 3 * result.stderr_j


def test_the_meter_passes_the_contract(page, monkeypatch) -> None:
    time = VirtualTime()
    pdu = SimpleNamespace(joules=lambda: float(int(200 * (time.now() // 0.5) * 0.5)))
    monkeypatch.setitem(page, "SystemTime", lambda: time)
    monkeypatch.setitem(page, "my_pdu", pdu)
    contract = page["TestPduMeter"]()
    tests = [name for name in dir(contract) if name.startswith("test_")]
    assert len(tests) == 10
    for name in tests:
        if name == "test_a_broken_sensor_raises":  # the page does not fill in break_sensor
            continue
        getattr(contract, name)()


def test_objective_and_policy_steer_a_session(page) -> None:
    device = Kernels()
    policy = page["UncertainFirst"](5)
    deadline_s = 1.3e-3
    session = Session(
        objective=page["EnergyUnderDeadline"](deadline_s),
        policy=policy,
        model=XgbKernelModel(),
        rng=np.random.default_rng(0),
    )
    session.add_task(TASK, "main")
    measured = []
    for _ in range(4):
        batch = device.batch(32)
        measured.append(session.run_round(TASK, batch, device.measurer(batch)).measured)
    assert measured[0] > 5
    assert max(measured[2:]) <= 5
    choice = session.choice(TASK)
    assert choice is not None
    assert choice.best.latency_s <= deadline_s
