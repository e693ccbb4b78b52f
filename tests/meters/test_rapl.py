from __future__ import annotations

import os
from pathlib import Path

import pytest
from virtual_gpu import BlockingLoad, VirtualGpu

from tvm_energy.errors import MeterUnavailable
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.meters.rapl import open_rapl_meter
from tvm_energy.protocol import measure


class Powercap:
    """A powercap folder whose counters follow a virtual machine's true power."""

    def __init__(self, root: Path, range_uj: int = 262_143_328_850) -> None:
        self.root = root
        self.machine = VirtualGpu(idle_power_w=20.0)
        self.range_uj = range_uj
        self.shares: dict[Path, tuple[float, int]] = {}
        self.written: dict[Path, int] = {}

    def add(self, folder: str, name: str, share: float, start_uj: int = 0) -> Path:
        path = self.root / folder
        path.mkdir(parents=True)
        (path / "name").write_text(f"{name}\n")
        (path / "max_energy_range_uj").write_text(f"{self.range_uj}\n")
        self.shares[path] = (share, start_uj)
        self.update()
        return path

    def update(self) -> None:
        """Write the counters as of now (they move every millisecond)."""
        at_s = int(self.machine.clock.now() * 1e3) / 1e3
        energy_j = self.machine.timeline.cumulative_j(at_s)
        for path, (share, start_uj) in self.shares.items():
            value = (start_uj + int(share * energy_j * 1e6)) % self.range_uj
            if self.written.get(path) != value:
                self.written[path] = value
                (path / "energy_uj").write_text(f"{value}\n")

    def now(self) -> float:
        return self.machine.clock.now()

    def sleep(self, seconds: float) -> None:
        self.machine.clock.sleep(seconds)
        self.update()


class CpuLoad(BlockingLoad):
    """Keeps the counters' files up to date."""

    def __init__(self, powercap: Powercap, latency_s: float, power_w: float) -> None:
        super().__init__(powercap.machine, latency_s, lambda _: power_w)
        self.powercap = powercap

    def enqueue(self, launches: int) -> None:
        super().enqueue(launches)
        self.powercap.update()


@pytest.fixture
def powercap(tmp_path: Path) -> Powercap:
    return Powercap(tmp_path)


def test_packages_are_summed_and_nothing_is_counted_twice(powercap: Powercap) -> None:
    powercap.add("intel-rapl:0", "package-0", 0.75)
    powercap.add("intel-rapl:0:0", "core", 0.5)
    powercap.add("intel-rapl:0:1", "dram", 0.2)
    powercap.add("intel-rapl:1", "package-1", 0.25)
    powercap.add("intel-rapl:2", "psys", 1.4)
    powercap.add("intel-rapl-mmio:0", "package-0", 0.75)
    meter = open_rapl_meter(root=powercap.root, time=powercap)
    before = meter.read()
    powercap.sleep(2.0)
    after = meter.read()
    assert before.energy_j is not None
    assert after.energy_j is not None
    assert after.energy_j - before.energy_j == pytest.approx(2.0 * 20.0, abs=0.05)
    assert meter.info.scope == "package"
    assert meter.info.method == "counter"
    assert meter.info.update_period_s == pytest.approx(1e-3, rel=0.2)


def test_a_kernel_on_the_processor(powercap: Powercap) -> None:
    powercap.add("intel-rapl:0", "package-0", 0.5)
    powercap.add("intel-rapl:1", "package-1", 0.5)
    meter = open_rapl_meter(root=powercap.root, time=powercap)
    result = measure(CpuLoad(powercap, 3e-4, 95.0), meter, MeasurementPlan())
    assert result.energy_j == pytest.approx(3e-4 * 95.0, rel=0.003)
    assert result.meter == "rapl"
    assert not result.simulated


def test_wrap_around_while_measuring(tmp_path: Path) -> None:
    """A counter of 60 J turns over several times, each package at a moment of its own."""
    powercap = Powercap(tmp_path, range_uj=60_000_000)
    powercap.add("intel-rapl:0", "package-0", 0.6, start_uj=59_000_000)
    powercap.add("intel-rapl:1", "package-1", 0.4, start_uj=20_000_000)
    meter = open_rapl_meter(root=powercap.root, time=powercap)
    result = measure(CpuLoad(powercap, 3e-4, 95.0), meter, MeasurementPlan())
    assert powercap.machine.timeline.cumulative_j(powercap.now()) > 3 * 60
    assert result.energy_j == pytest.approx(3e-4 * 95.0, rel=0.003)
    assert "reset" not in result.quality


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_for_real(powercap: Powercap) -> None:
    (powercap.add("intel-rapl:0", "package-0", 1.0) / "energy_uj").chmod(0o000)
    with pytest.raises(MeterUnavailable, match="chmod"):
        open_rapl_meter(root=powercap.root, time=powercap)


def test_no_permission_says_how_to_get_it(
    powercap: Powercap, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = powercap.add("intel-rapl:0", "package-0", 1.0) / "energy_uj"
    real = Path.read_text

    def read_text(self: Path, *args: object, **kwargs: object) -> str:
        if self == path:  # as for anybody but root since Linux 5.10
            raise PermissionError(13, "Permission denied", str(path))
        return real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(MeterUnavailable, match="may not be read") as caught:
        open_rapl_meter(root=powercap.root, time=powercap)
    assert "chmod o+r" in str(caught.value)
    assert "udev" in str(caught.value)


def test_no_counters(tmp_path: Path, powercap: Powercap) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(MeterUnavailable, match="no processor energy counter"):
            open_rapl_meter(root=root)
    powercap.add("intel-rapl:0:0", "core", 1.0)
    with pytest.raises(MeterUnavailable, match="no processor energy counter"):
        open_rapl_meter(root=powercap.root, time=powercap)


@pytest.mark.parametrize("name", ["energy_uj", "max_energy_range_uj"])
def test_a_file_that_holds_no_number(powercap: Powercap, name: str) -> None:
    folder = powercap.add("intel-rapl:0", "package-0", 1.0)
    (folder / name).write_text("")
    with pytest.raises(MeterUnavailable, match=f"{name} holds '', not a number"):
        open_rapl_meter(root=powercap.root, time=powercap)


def test_counters_that_stand_still(powercap: Powercap) -> None:
    powercap.add("intel-rapl:0", "package-0", 0.0)
    with pytest.raises(MeterUnavailable, match="do not move"):
        open_rapl_meter(root=powercap.root, time=powercap)


def test_the_power_limit_is_the_highest_of_all_packages(powercap: Powercap) -> None:
    for index in (0, 1):
        folder = powercap.add(f"intel-rapl:{index}", f"package-{index}", 0.5)
        (folder / "constraint_0_power_limit_uw").write_text("125000000\n")
        (folder / "constraint_1_power_limit_uw").write_text("180000000\n")
    meter = open_rapl_meter(root=powercap.root, time=powercap)
    assert meter.info.max_power_w == pytest.approx(360.0)
    meter.close()
