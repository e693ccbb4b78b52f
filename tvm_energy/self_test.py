"""Whether a device's sensors can be believed: they are compared with each other, at idle and under load.

::

    power            load, known or not
      │          ┌──────────────────────┐
      │  idle    │ warm-up │  compared  │       counter: joules / seconds
      │ compared │         │            │       instant power: integrated
      └──────────┴─────────┴────────────┘       usage or average: after it has forgotten

One user's counter said 187 J where integrated power said 327 J (zeus#181), others stand still or show
what cannot be. The outcome names the sensor to use; it is kept for each GPU and driver version, goes into the
headers of logs, and decides which sensor later runs open (`open_tested_meter`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tvm_energy.errors import MeasurementError, MeterUnavailable
from tvm_energy.meters.base import Load, MeterInfo, PowerMeter
from tvm_energy.meters.update_period import watch_changes
from tvm_energy.meters.window import LONG_AVERAGE_S
from tvm_energy.stretch import DeviceEnergy, StretchRecorder

__all__ = [
    "Field",
    "SelfTest",
    "SensorTest",
    "decide",
    "forget_self_test",
    "load_self_test",
    "open_sensors",
    "open_tested_meter",
    "save_self_test",
    "self_test",
]

Field = Literal["counter", "instant", "usage"]
_FIELDS: tuple[Field, ...] = get_args(Field)

#: Two sensors agree within a tenth, or within what a sensor's offset may be.
_TOLERANCE, _TOLERANCE_W = 0.10, 5.0
#: Under load a device draws more than idle by at least this, or the sensor does not see it.
_LEAST_RISE_W = 3.0

_CHUNK_S = 0.05
_WARM_UP_S = 1.0
_PERIOD_LIMIT_S = 2.5
_POLL_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorTest:
    """One sensor.

    Attributes:
        field: ``counter``, ``instant`` or ``usage``.
        method, scope: as in `MeterInfo`; empty where it does not answer.
        update_period_s: median time between updates; None where it changed too seldom.
        idle_w, load_w: mean power at idle and under load; None where not measured.
        problem: why it is not to be used; empty if it is fine by itself.
    """

    field: Field
    method: str = ""
    scope: str = ""
    update_period_s: float | None = None
    idle_w: float | None = None
    load_w: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """What a self-test found.

    Attributes:
        device_name, device_uuid, driver_version, simulated: of what was tested.
        created: Unix time in seconds.
        sensors: each sensor.
        field: the sensor to use; None where none is trustworthy.
        agree: whether counter and instant power agree; None where they could not be compared.
        verdict: why, in one sentence.
        load: what ran; empty where only idle power could be compared.
        true_load_w: power of a simulated device under load, which no real device tells.
    """

    device_name: str
    device_uuid: str
    driver_version: str | None
    simulated: bool
    created: float
    sensors: tuple[SensorTest, ...]
    field: Field | None
    agree: bool | None
    verdict: str
    load: str
    true_load_w: float | None = None

    def to_json(self) -> dict[str, Any]:
        """All attributes as JSON values."""
        return asdict(self) | {"sensors": [asdict(sensor) for sensor in self.sensors]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SelfTest:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: a value is missing or wrong.
        """
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        known["sensors"] = tuple(SensorTest(**sensor) for sensor in known["sensors"])
        result = cls(**known)
        if result.field is not None and result.field not in _FIELDS:
            raise ValueError(f"field must be one of {', '.join(_FIELDS)}, got {result.field!r}")
        return result


def self_test(
    meters: Mapping[Field, PowerMeter | str],
    load: Load | None,
    *,
    load_name: str = "",
    seconds: float = 3.0,
    true_load_w: Callable[[], float] | None = None,
) -> SelfTest:
    """Compare the sensors of one device at idle and, where there is a load, under it.

    Args:
        meters: the sensors by name, as `open_sensors` gives them; a text says why one is missing.
        load: keeps the device busy; None compares at idle only.
        load_name: what the load is.
        seconds: length of each of the two comparisons.
        true_load_w: for a simulated device, its true power under that load.

    Raises:
        MeterUnavailable: no sensor answers.
        ValueError: ``seconds`` is not positive.
    """
    opened = {name: meter for name, meter in meters.items() if not isinstance(meter, str)}
    if not opened:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in meters.items())
        raise MeterUnavailable(f"no sensor answers ({reasons})")
    recorder = StretchRecorder(list(opened.values()))
    at_idle = dict(zip(opened, recorder.measure_idle(seconds), strict=True))
    periods = {name: _period_s(meter) for name, meter in opened.items()}
    under_load = (
        {}
        if load is None
        else dict(zip(opened, _run(load, recorder, opened, seconds), strict=True))
    )
    sensors = [
        SensorTest(field=name, problem=meter)
        if isinstance(meter, str)
        else _sensor_test(name, meter.info, periods[name], at_idle[name], under_load.get(name))
        for name, meter in meters.items()
    ]
    info = next(iter(opened.values())).info
    field, agree, verdict = decide(sensors)
    return SelfTest(
        device_name=info.device_name,
        device_uuid=info.device_uuid,
        driver_version=info.driver_version,
        simulated=info.simulated,
        created=time.time(),
        sensors=tuple(sensors),
        field=field,
        agree=agree,
        verdict=verdict,
        load="" if load is None else load_name,
        true_load_w=None if load is None or true_load_w is None else true_load_w(),
    )


def decide(sensors: Sequence[SensorTest]) -> tuple[Field | None, bool | None, str]:
    """Which sensor to use, whether counter and instant power agree, and why, in one sentence.

    Where counter and integrated instant power disagree, the one that lies nearer to the averaged power
    is taken; without a third opinion it is the instant power, since a counter has no way to show
    that it is wrong.
    """
    fine = {sensor.field: sensor for sensor in sensors if not sensor.problem}
    counter, instant, third = fine.get("counter"), fine.get("instant"), fine.get("usage")
    if third is not None and counter is not None and third.scope != counter.scope:
        third = None
    if counter is None or instant is None:
        best = next((name for name in _FIELDS if name in fine), None)
        if best is None:
            return None, None, "no sensor is trustworthy: " + _problems(sensors)
        others = _problems(sensors)
        return best, None, f"{_title(best)} is used" + (f" ({others})" if others else "")
    if counter.scope != instant.scope:
        return (
            "counter",
            None,
            f"the counter ({counter.scope}) and instant power ({instant.scope}) cover different parts and "
            "were not compared: the counter is used",
        )
    if _agree(counter, instant):
        return "counter", True, "counter and integrated instant power agree: the counter is used"
    against = f"counter says {_watts(counter)}, integrated instant power {_watts(instant)}"
    if third is None:
        return "instant", False, f"{against}; no third sensor decides: instant power is used"
    nearer: Field = (
        "counter" if _distance_w(counter, third) < _distance_w(instant, third) else "instant"
    )
    return (
        nearer,
        False,
        f"{against}; power usage says {_watts(third)}: {_title(nearer)} is used",
    )


def open_sensors(
    open_one: Callable[[Field], PowerMeter],
) -> dict[Field, PowerMeter | str]:
    """Every sensor of a device by name, or why it cannot be opened.

    Args:
        open_one: opens the sensor of that name; raises `MeterUnavailable` where there is none.
    """
    found: dict[Field, PowerMeter | str] = {}
    for name in _FIELDS:
        try:
            found[name] = open_one(name)
        except MeterUnavailable as exc:
            found[name] = str(exc).partition(";")[0]
    return found


# ---- what was found before ----------------------------------------------------------------------


def save_self_test(result: SelfTest, folder: Path | None = None) -> Path | None:
    """Keep the result for later runs; None for a simulated device, whose runs must not depend on it.

    Args:
        result: of `self_test`.
        folder: where; None is ``tvm_energy/self_test`` in the user's cache.

    Raises:
        OSError: the folder cannot be written.
    """
    if result.simulated:
        return None
    path = _file(result.device_uuid, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.to_json(), allow_nan=False) + "\n", encoding="utf-8")
    return path


def load_self_test(
    device_uuid: str, driver_version: str | None, folder: Path | None = None
) -> SelfTest | None:
    """The kept result; None where there is none for this GPU with this driver."""
    try:
        values = json.loads(_file(device_uuid, folder).read_text(encoding="utf-8"))
        result = SelfTest.from_json(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    same = (result.device_uuid, result.driver_version) == (device_uuid, driver_version)
    return result if same else None


def forget_self_test(device_uuid: str, folder: Path | None = None) -> None:
    """Drop the kept result of a GPU, so that a new test does not depend on it."""
    with contextlib.suppress(OSError):
        _file(device_uuid, folder).unlink()


def open_tested_meter(
    uuid_or_index: str | int | None = None, *, force: bool = False, nvml: Any = None
) -> tuple[PowerMeter, SelfTest | None]:
    """Open the sensor that the GPU's self-test chose, or without one the best that answers.

    Args:
        uuid_or_index, force, nvml: as in `tvm_energy.meters.nvml.open_nvml_meter`.

    Returns:
        The meter, and the kept self-test that was obeyed.

    Raises:
        MeterUnavailable: with the reason and the remedy.
    """
    from tvm_energy.meters.nvml import open_nvml_meter

    meter = open_nvml_meter(uuid_or_index, force=force, nvml=nvml)
    info = meter.info
    kept = None if info.simulated else load_self_test(info.device_uuid, info.driver_version)
    if kept is None or (kept.field == "counter" and info.method == "counter"):
        return meter, kept
    meter.close()
    if kept.field is None:
        raise MeterUnavailable(
            f"{info.device_name}: the last self-test found {kept.verdict}; mend it, then run: "
            "tvm-energy doctor --self-test"
        )
    try:
        return open_nvml_meter(info.device_uuid, field=kept.field, force=force, nvml=nvml), kept
    except MeterUnavailable as exc:
        raise MeterUnavailable(
            f"{exc}; the last self-test chose this sensor, run it again: tvm-energy doctor --self-test"
        ) from exc


def _file(device_uuid: str, folder: Path | None) -> Path:
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "tvm_energy" / "self_test"
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', device_uuid)}.json"


# ---- parts ------------------------------------------------------------------------------------


class _KeepBusy:
    """Runs a load in chunks, each of them started before the sensors are read."""

    def __init__(self, load: Load, meter: PowerMeter) -> None:
        self._load = load
        self._time = meter.time
        load.enqueue(1)  # the first launch loads code
        load.synchronize()
        self._launches = 1
        while True:
            started_s = self._time.now()
            load.enqueue(self._launches)
            load.synchronize()
            if self._time.now() - started_s >= 0.5 * _CHUNK_S or self._launches >= 1 << 20:
                break
            self._launches *= 2

    def chunk(self) -> None:
        """Wait for the running chunk and start the next."""
        self._load.synchronize()
        self._load.enqueue(self._launches)

    def run(self, seconds: float) -> None:
        """Run for that long."""
        until_s = self._time.now() + seconds
        while self._time.now() < until_s:
            self.chunk()
        self._load.synchronize()

    def until(self, seconds: float) -> Callable[[float], bool]:
        """A `StretchRecorder.follow` argument that runs the load for that long."""
        until_s = self._time.now() + seconds

        def wait(at_most_s: float) -> bool:
            if self._time.now() >= until_s:
                return True
            self.chunk()
            self._time.sleep(min(at_most_s, 0.5 * _CHUNK_S))
            return False

        return wait


def _run(
    load: Load, recorder: StretchRecorder, meters: Mapping[Field, PowerMeter], seconds: float
) -> list[DeviceEnergy]:
    """What each sensor sees in a stretch of steady load."""
    keep_busy = _KeepBusy(load, next(iter(meters.values())))
    keep_busy.run(_WARM_UP_S + LONG_AVERAGE_S)
    # The updates around the start and the end must belong to the load, too.
    margin_s = 1.5 * max(meter.info.update_period_s for meter in meters.values())
    recorder.follow(keep_busy.until(margin_s))
    start_s = recorder.begin()
    end_s = recorder.follow(keep_busy.until(seconds))
    recorder.follow(keep_busy.until(margin_s))
    load.synchronize()
    return recorder.finish(start_s, end_s)


def _period_s(meter: PowerMeter) -> float | None:
    def read() -> float:
        reading = meter.read()
        value = reading.power_w if reading.energy_j is None else reading.energy_j
        assert value is not None
        return value

    with contextlib.suppress(MeasurementError, MeterUnavailable):
        changes = watch_changes(
            read, meter.time, poll_s=_POLL_S, limit_s=_PERIOD_LIMIT_S, wanted=15
        )
        return changes.update_period_s
    return None


def _sensor_test(
    name: Field,
    info: MeterInfo,
    period_s: float | None,
    at_idle: DeviceEnergy,
    under_load: DeviceEnergy | None,
) -> SensorTest:
    idle_w = at_idle.mean_power_w
    load_w = None if under_load is None else under_load.mean_power_w
    problem = ""
    if idle_w is None:
        problem = at_idle.quality
    elif under_load is not None and load_w is None:
        problem = under_load.quality
    elif load_w is not None and load_w - idle_w < _LEAST_RISE_W:
        problem = f"it does not see the load: {idle_w:.1f} W at idle, {load_w:.1f} W under load"
    return SensorTest(
        field=name,
        method=info.method,
        scope=info.scope,
        update_period_s=period_s,
        idle_w=idle_w,
        load_w=load_w,
        problem=problem,
    )


def _agree(one: SensorTest, other: SensorTest) -> bool:
    return all(
        first is None
        or second is None
        or abs(first - second) <= max(_TOLERANCE * max(first, second), _TOLERANCE_W)
        for first, second in ((one.idle_w, other.idle_w), (one.load_w, other.load_w))
    )


def _distance_w(one: SensorTest, other: SensorTest) -> float:
    pairs = ((one.idle_w, other.idle_w), (one.load_w, other.load_w))
    return sum(abs(a - b) for a, b in pairs if a is not None and b is not None)


def _watts(sensor: SensorTest) -> str:
    idle = "?" if sensor.idle_w is None else f"{sensor.idle_w:.1f} W"
    return f"{idle} at idle" + (
        "" if sensor.load_w is None else f" and {sensor.load_w:.1f} W under load"
    )


def _title(field: Field) -> str:
    titles: dict[Field, str] = {
        "counter": "the counter",
        "instant": "instant power",
        "usage": "power usage",
    }
    return titles[field]


def _problems(sensors: Sequence[SensorTest]) -> str:
    return "; ".join(f"{_title(s.field)}: {s.problem}" for s in sensors if s.problem)
