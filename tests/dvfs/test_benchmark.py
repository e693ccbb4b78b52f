"""The benchmark's methods and its figures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_dvfs.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_dvfs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_dvfs"] = module
    spec.loader.exec_module(module)
    return module


def test_kernel_tuners_fit_gives_its_known_ridge(bench: ModuleType) -> None:
    (device,) = bench.kernel_tuner(bench.DATA, False)
    ten = [int(np.argmin(np.abs(device.clock_mhz - f))) for f in range(210, 1411, 135)]
    predicted = bench.kernel_tuner_ridge(device, ten)
    assert abs(device.clock_mhz[predicted.chosen[0]] - 959) <= 30


def test_five_clocks_keep_the_goals_where_the_noise_allows(bench: ModuleType) -> None:
    for load in (bench.zeus_stages, bench.kernel_tuner):
        devices = load(bench.DATA, True)
        measured = [bench.choose_clocks(device, 5) for device in devices]
        rest = [
            np.setdiff1d(np.arange(len(device.clock_mhz)), at)
            for device, at in zip(devices, measured, strict=True)
        ]
        predicted = [bench.ours(device, at) for device, at in zip(devices, measured, strict=True)]
        found = bench.figures(devices, predicted, rest)
        assert all(len(at) == 5 for at in measured)
        assert found["median_latency_error"] <= 0.01
        assert found["p95_latency_error"] <= 0.03
        assert found["median_power_error"] <= 0.02
        assert found["max_regret"] <= 0.01


def test_the_choice_of_clocks_never_sees_unmeasured_values(bench: ModuleType) -> None:
    (device,) = bench.kernel_tuner(bench.DATA, False)
    measured = bench.choose_clocks(device, 5)
    rng = np.random.default_rng(0)
    hidden = np.ones(len(device.clock_mhz), dtype=bool)
    hidden[measured] = False
    t, p = device.latency_s.copy(), device.power_w.copy()
    t[:, hidden] *= rng.uniform(0.1, 10, hidden.sum())
    p[:, hidden] *= rng.uniform(0.1, 10, hidden.sum())
    assert bench.choose_clocks(bench.Device(device.clock_mhz, t, p), 5) == measured


def test_energy_is_time_times_power_in_the_gpuptxmodel_data(bench: ModuleType) -> None:
    device = bench.gpuptxmodel(bench.DATA, False)[1]
    best = device.clock_mhz[np.argmin(device.latency_s * device.power_w, axis=1)]
    clocks, count = np.unique(best, return_counts=True)
    found = dict(zip(clocks.tolist(), count.tolist(), strict=True))
    assert found == {975: 30, 1013: 94, 1050: 15, 1088: 1}
