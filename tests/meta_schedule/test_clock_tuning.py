"""`clocks=`: kernel and clock chosen together, on a simulated GPU, from the search to the deployment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import tvm_energy
from tvm_energy.errors import ConfigurationError
from tvm_energy.manifest import deployed_clock
from tvm_energy.meta_schedule.export import export
from tvm_energy.meta_schedule.traces import trace_key
from tvm_energy.meta_schedule.tuning import TuningTask, normalized, run
from tvm_energy.meta_schedule.workloads import parse_workload
from tvm_energy.meters.nvml_clocks import open_clock_control
from tvm_energy.records import FILE_NAME, ClockRecord, Header, Record, read_records
from tvm_energy.replay import summarize
from tvm_energy.simulation.devices import find_device
from tvm_energy.simulation.load import SimulatedGpu

# isort: split
import tvm
from tvm.s_tir import meta_schedule as ms

pytestmark = pytest.mark.tuning

SPECS = ("matmul:m=128,n=128,k=128", "add:size=1048576")


def records_of(work_dir: Path) -> list[Record]:
    return list(read_records(work_dir / FILE_NAME))


def points_of(work_dir: Path) -> list[ClockRecord]:
    return [record for record in records_of(work_dir) if isinstance(record, ClockRecord)]


def tune(work_dir: Path, trials: int = 16, **options: object):
    return run(
        [TuningTask(name=spec, mod=parse_workload(spec).primfunc(), weight=2) for spec in SPECS],
        device="sim:a100",
        work_dir=work_dir,
        trials=trials,
        trials_per_round=8,
        seed=1,
        population=16,
        finalists=2,
        objective="energy:slack=0.2",
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory):
    """A finished run without clocks, and its work directory after the same command with clocks."""
    plain, work_dir = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("clocks")
    tune(plain)
    shutil.copytree(plain, work_dir, dirs_exist_ok=True)
    return plain, work_dir, tune(work_dir, clocks=4)


def test_one_clock_is_chosen_for_the_network_and_saves_energy(tuned) -> None:
    _, work_dir, _ = tuned
    summary = summarize(work_dir)
    header = [record for record in records_of(work_dir) if isinstance(record, Header)][-1]
    assert header.clocks == {"finalists": 4, "per_kernel": False}
    assert summary.clock_choice == "one"
    assert summary.clock_mhz is not None
    assert {task.best.clock_mhz for task in summary.tasks if task.best} == {summary.clock_mhz}
    totals = summary.totals
    assert totals is not None
    assert totals.clock_saved_fraction is not None
    assert (
        totals.clock_saved_fraction > 0.05
    )  # a fifth more time lowers voltage by much more than that
    assert totals.best_latency_s <= 1.2 * totals.fastest_latency_s
    points = points_of(work_dir)
    for task in summary.tasks:
        assert task.best is not None
        mine = [point for point in points if point.workload == task.workload]
        assert 3 <= len({point.clock_mhz for point in mine}) <= 4
        chosen = [p for p in mine if (p.key, p.clock_mhz) == (task.best.key, task.best.clock_mhz)]
        assert chosen[-1].confirmed
        assert chosen[-1].measured.energy_j == task.best.energy_j
    assert all(point.measured.clock_mhz == point.clock_mhz for point in points)


def test_the_database_deploys_the_kernel_of_the_pair(tuned) -> None:
    _, work_dir, database = tuned
    target = tvm.target.Target("nvidia/nvidia-a100")
    for task in summarize(work_dir).tasks:
        module = normalized(parse_workload(task.name).primfunc())
        record = database.query_tuning_record(module, target, "main")
        assert task.best is not None
        assert trace_key(record.trace) == task.best.key


def test_the_export_says_which_clock_and_it_can_be_held(tuned, tmp_path: Path) -> None:
    _, work_dir, _ = tuned
    manifest = export(work_dir, tmp_path / "deploy")
    summary = summarize(work_dir)
    assert manifest["clock_choice"] == "one"
    for kernel in manifest["kernels"]:
        assert kernel["clock_mhz"] == summary.clock_mhz
        assert kernel["measurement"]["energy_j"] == kernel["energy_j"]
        assert kernel["from"]["energy_record_kind"] == "clock"
        line = (
            (work_dir / FILE_NAME)
            .read_text()
            .splitlines()[kernel["from"]["energy_record"]["line"] - 1]
        )
        assert json.loads(line)["clock_mhz"] == summary.clock_mhz
        assert kernel["at_default"]["clock_mhz"] is None
    gpu = SimulatedGpu(find_device("a100"))
    with deployed_clock(tmp_path / "deploy", control=open_clock_control(nvml=gpu.nvml())):
        assert gpu.clock_mhz == summary.clock_mhz
    default = export(work_dir, tmp_path / "default", clock_choice="default")
    assert {kernel["clock_mhz"] for kernel in default["kernels"]} == {None}


def test_the_same_command_again_measures_nothing(tuned) -> None:
    _, work_dir, _ = tuned
    before, summary = points_of(work_dir), summarize(work_dir)
    tune(work_dir, clocks=4)
    assert points_of(work_dir) == before
    assert summarize(work_dir).tasks == summary.tasks


def test_clocks_are_added_to_a_finished_run_and_chosen_for_each_kernel(
    tuned, tmp_path: Path
) -> None:
    plain, _, _ = tuned
    assert summarize(plain).clock_choice == "default"
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    tried = [record for record in records_of(tmp_path) if record.kind in ("candidate", "final")]
    tune(tmp_path, clocks=3, clock_per_kernel=True)
    assert [r for r in records_of(tmp_path) if r.kind in ("candidate", "final")] == tried
    summary = summarize(tmp_path)
    assert summary.clock_choice == "per-kernel"
    assert summary.clock_mhz is None
    assert all(task.clocks >= 3 for task in summary.tasks)
    assert summary.totals is not None
    assert summary.totals.best_energy_j is not None
    one = summarize(tmp_path, clock_choice="one").totals
    assert one is not None
    assert one.best_energy_j is not None
    assert summary.totals.best_energy_j <= one.best_energy_j * 1.002


def test_options_measure_at_clocks_too(tmp_path: Path) -> None:
    function = parse_workload("add:size=131072").primfunc()
    target = tvm.target.Target("nvidia/nvidia-a100")
    arguments = {"device": "sim:a100", "seed": 1, "finalists": 1}
    with tvm_energy.options(target, tmp_path, clocks=3, **arguments) as parts:
        ms.tune_tir(
            function,
            target,
            str(tmp_path),
            8,
            num_trials_per_iter=8,
            **parts,
        )
    assert summarize(tmp_path).clock_choice == "one"
    assert len({point.clock_mhz for point in points_of(tmp_path)}) >= 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clocks": 1}, "clocks must be at least 3, got 1"),
        ({"clocks": 5, "finalists": 0}, "--finalists"),
        ({"clocks": 5, "objective": "latency"}, "the highest clock is always the best"),
        ({"clock_per_kernel": True}, "needs the number of clocks"),
    ],
)
def test_wrong_arguments(changes: dict, message: str, tmp_path: Path) -> None:
    arguments = {"trials": 4, "device": "sim:a100", "work_dir": tmp_path / "out"}
    task = TuningTask(name="main", mod=parse_workload(SPECS[1]).primfunc())
    with pytest.raises(ConfigurationError, match=message):
        run([task], **(arguments | changes))


def test_the_clock_of_a_cpu_is_not_locked(tmp_path: Path) -> None:
    task = TuningTask(name="main", mod=parse_workload(SPECS[1]).primfunc())
    with pytest.raises(ConfigurationError, match="the clock of cpu cannot be locked"):
        run([task], device="cpu", work_dir=tmp_path, trials=4, clocks=5)
