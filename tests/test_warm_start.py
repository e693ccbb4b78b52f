"""Runs that begin with what an earlier one learned, and what they refuse to begin with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from test_session import Kernels

from tvm_energy.energy_model.base import Sample
from tvm_energy.energy_model.xgb import XgbKernelModel
from tvm_energy.errors import ConfigurationError
from tvm_energy.features import VECTOR_LENGTH
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.objective import parse_objective
from tvm_energy.policy import parse_policy
from tvm_energy.progress import SilentProgress
from tvm_energy.records import FILE_NAME, Header, read_records
from tvm_energy.session import Session
from tvm_energy.tuning_run import MODEL_FILE, TuningRun, open_run


@dataclass
class Gpu:
    """What `open_run` wants to know of a device."""

    uuid: str = "GPU-1"
    spec: str = "cuda"
    no_meter_reason: str = ""
    max_power_w: float | None = 250.0
    meter: dict[str, Any] | None = field(
        default_factory=lambda: {"meter": "nvml", "method": "counter", "scope": "gpu"}
    )

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": f"Test {self.uuid}", "uuid": self.uuid}


class Messages(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def opened(work_dir: Path, device: Gpu | None = None, **changes: Any) -> TuningRun:
    work_dir.mkdir(exist_ok=True)
    arguments: dict[str, Any] = {
        "objective": "energy",
        "policy": "snr",
        "seed": 1,
        "plan": None,
        "progress": SilentProgress(),
        "versions": {},
        "tuner": "test",
    }
    return open_run(device or Gpu(), work_dir, **arguments | changes)


def wide(samples: list[Sample]) -> list[Sample]:
    """With feature vectors of the length that tuners use."""
    return [
        Sample(
            group=sample.group,
            features=np.resize(np.append(sample.features, np.zeros(9)), VECTOR_LENGTH),
            latency_s=sample.latency_s,
            energy_j=sample.energy_j,
        )
        for sample in samples
    ]


def task(group: str, count: int = 100, seed: int = 1, scale: float = 1.0) -> list[Sample]:
    kernels = Kernels(seed)
    return wide(
        [
            Sample(
                group=group,
                features=candidate.features,
                latency_s=scale * kernels.latency_s(candidate.key),
                energy_j=scale * kernels.energy_j(candidate.key),
            )
            for candidate in kernels.batch(count)
        ]
    )


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The work directory of a finished run."""
    run = opened(tmp_path / "earlier")
    run.model.fit(task("a") + task("b", seed=2, scale=20))
    run.save_model()
    run.log.close()
    return tmp_path / "earlier"


def header_of(work_dir: Path) -> Header:
    (header,) = [record for record in read_records(work_dir / FILE_NAME)]
    assert isinstance(header, Header)
    return header


@pytest.mark.parametrize("name", ["", MODEL_FILE])
def test_a_run_begins_with_an_earlier_one(name: str, earlier: Path, tmp_path: Path) -> None:
    progress = Messages()
    run = opened(tmp_path / "new", model=earlier / name, progress=progress)
    run.log.close()
    assert progress.texts == [f"starting from 200 kernels of {earlier / MODEL_FILE}"]
    header = header_of(tmp_path / "new")
    assert header.model is not None
    assert header.model["prior"] == "none"
    start = header.model["start"]
    assert (start["file"], start["samples"]) == (str(earlier / MODEL_FILE), 200)
    assert start["energies"] is True
    assert len(start["sha256"]) == 64
    # Predictions lead the search of a task that the earlier run knew before any of its kernels has run.
    assert not run.session.leads("new")
    new = task("b", seed=3, scale=20)
    assert run.session.leads("b")
    scores = run.session.scores("b", np.stack([sample.features for sample in new]))
    assert spearmanr(scores, [sample.energy_j for sample in new]).statistic < -0.7
    # Scores of different calls can be compared: the first call set the measure.
    best = int(np.argmax(scores))
    assert run.session.scores("b", new[best].features[None]) == pytest.approx(scores[best])


def test_without_an_earlier_run_the_first_round_is_at_random(tmp_path: Path) -> None:
    run = opened(tmp_path / "new")
    run.log.close()
    assert not run.session.leads("a")
    assert header_of(tmp_path / "new").model == {"prior": "none", "start": None}


def test_nothing_is_written_before_anything_has_run(tmp_path: Path) -> None:
    run = opened(tmp_path / "new")
    run.save_model()
    run.log.close()
    assert not (tmp_path / "new" / MODEL_FILE).exists()


def edited(earlier: Path, **changes: Any) -> Path:
    path = earlier / MODEL_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def narrow(earlier: Path) -> Path:
    values = json.loads((earlier / MODEL_FILE).read_text())
    values["samples"]["features"] = [row[:6] for row in values["samples"]["features"]]
    return edited(earlier, samples=values["samples"])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: folder / "nowhere.json", "there is no such file"),
        (lambda folder: folder.parent, "the folder has no energy_model.json"),
        (lambda folder: folder / FILE_NAME, "is not an energy model of this version"),
        (lambda folder: edited(folder, version=3), "is not an energy model of this version"),
        (lambda folder: edited(folder, samples=[]), "is not an energy model of this version"),
        (lambda folder: edited(folder, origin={}), "expected a JSON object"),
        (lambda folder: edited(folder, origin={"header": 1}), "expected a JSON object"),
        (narrow, "by 6 features instead of 333"),
    ],
    ids=["missing", "folder", "records", "old", "samples", "origin", "header", "features"],
)
def test_what_is_no_model_is_refused(make: Any, reason: str, earlier: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        opened(tmp_path / "new", model=make(earlier))
    assert not (tmp_path / "new" / FILE_NAME).exists()


def test_other_devices_tuners_and_clocks_are_refused(earlier: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"of device 'Test GPU-1' \(GPU-1\), not of GPU-2"):
        opened(tmp_path / "new", Gpu(uuid="GPU-2"), model=earlier)
    with pytest.raises(ConfigurationError, match="of the tuner 'test', whose features differ"):
        opened(tmp_path / "new", model=earlier, tuner="another")
    values = json.loads((earlier / MODEL_FILE).read_text())["origin"]
    values["header"]["clocks"] = {"core_mhz": 1410}
    with pytest.raises(ConfigurationError, match="the clock was locked otherwise"):
        opened(tmp_path / "new", model=edited(earlier, origin=values))


def test_a_run_does_not_begin_with_itself(earlier: Path) -> None:
    with pytest.raises(ConfigurationError, match="of the work directory itself"):
        opened(earlier, model=earlier)


def test_energies_measured_in_another_way_are_not_used(earlier: Path, tmp_path: Path) -> None:
    progress = Messages()
    run = opened(
        tmp_path / "new", model=earlier, plan=MeasurementPlan(window_s=2.0), progress=progress
    )
    run.log.close()
    assert "window_s" in progress.texts[0]
    assert "only its latencies are used" in progress.texts[0]
    start = header_of(tmp_path / "new").model["start"]  # type: ignore[index]
    assert (start["samples"], start["energies"]) == (200, False)
    foreseen = run.model.predict(task("a", 3)[0].features[None], "a")
    assert foreseen is not None
    assert foreseen.energy_j is None


def test_tasks_of_one_run_share_what_is_learned() -> None:
    """A task's kernels are predicted better after other tasks of the network have run."""
    errors = {}
    for name, others in (("alone", []), ("after others", ["a", "b"])):
        session = Session(
            objective=parse_objective("energy"),
            policy=parse_policy("all"),
            model=XgbKernelModel(seed=1),
            rng=np.random.default_rng(1),
        )
        for number, workload in enumerate([*others, "new"]):
            kernels = Kernels(number if workload != "new" else 9)
            batch = kernels.batch(12 if workload == "new" else 100)
            session.run_round(workload, batch, kernels.measurer(batch))
        test = kernels.batch(100)
        prediction = session.model.predict(
            np.stack([each.features for each in test]),
            "new",
            np.array([each.latency_s for each in test]),
        )
        assert prediction is not None
        assert prediction.energy_j is not None
        truth_j = np.array([kernels.energy_j(each.key) for each in test])
        errors[name] = np.std(np.log(prediction.energy_j / truth_j))
    assert errors["after others"] < 0.7 * errors["alone"]
