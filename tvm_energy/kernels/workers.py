"""What runs in worker processes: timing and measuring built kernels.

Everything that enters or leaves these functions is plain data. A worker that crashes or hangs is
killed and replaced by its pool, and costs one candidate.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Sequence
from typing import Any

from tvm_energy.errors import ConfigurationError, MeasurementError, MeterUnavailable
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meters.base import MeterInfo
from tvm_energy.meters.nvml_devices import WORKER_VARIABLE

#: A kernel this many times slower than the best of its shape needs no accurate latency. The first factor
#: is for a single run with cold caches, the second for a timing over `SHORT_MS` milliseconds.
HOPELESS_FACTOR = 4.0
SLOW_FACTOR = 1.5
SHORT_MS = 10

#: How candidates are linked: without the start-up files and libraries of C++, of which a kernel needs
#: none; that is five times faster. The C library's functions come from the process that loads it.
LINK_OPTIONS = ["-nostdlib", "-lm"]

#: Shape and dtype of one argument of a kernel.
ArgumentInfo = tuple[tuple[int, ...], str]


def prepare_worker(environment: dict[str, str]) -> None:
    """Runs once in each new worker process, before any device is touched."""
    os.environ.update(environment)
    os.environ[WORKER_VARIABLE] = "1"
    import tvm  # noqa: F401


def run_library(
    path: str,
    device_type: str,
    arguments: Sequence[ArgumentInfo],
    *,
    number: int,
    repeat: int,
    min_repeat_ms: int,
    best_s: float,
    seed: int,
    preprocess: str = "",
) -> list[float]:
    """Time one kernel; seconds a launch, one number for each repeat.

    Args:
        path: shared library made by the adapter.
        device_type: ``cpu`` or ``cuda``.
        arguments: shapes and dtypes of the kernel's arguments.
        number, repeat, min_repeat_ms: as in MetaSchedule's ``EvaluatorConfig``.
        best_s: the best known time of a kernel that does the same. A kernel which a single run shows to
            be `HOPELESS_FACTOR` times slower, or a short timing `SLOW_FACTOR` times, is not timed any longer;
            that timing is returned.
        seed: of the data in the arguments.
        preprocess: name of the TVM function that is called before each repeat, or nothing.
    """
    library, device, tensors = _load(path, device_type, arguments, seed)
    probe = library.time_evaluator(library.entry_name, device, number=1, repeat=1)
    first_s = float(probe(*tensors).results[0])
    if first_s > HOPELESS_FACTOR * best_s:
        return [first_s]

    def timed(number: int, repeat: int, min_repeat_ms: int) -> list[float]:
        evaluator = library.time_evaluator(
            library.entry_name,
            device,
            number=number,
            repeat=repeat,
            min_repeat_ms=min_repeat_ms,
            f_preproc=preprocess,
        )
        device.sync()
        return [float(value) for value in evaluator(*tensors).results]

    if min_repeat_ms > SHORT_MS and math.isfinite(best_s):
        short = timed(1, 1, SHORT_MS)
        if short[0] > SLOW_FACTOR * best_s:
            return short
    return timed(number, repeat, min_repeat_ms)


def time_library(path: str, device_type: str, arguments: Sequence[ArgumentInfo]) -> list[float]:
    """As `run_library`, for a kernel whose latency is wanted whatever it is."""
    return run_library(
        path,
        device_type,
        arguments,
        number=1,
        repeat=5,
        min_repeat_ms=100,
        best_s=math.inf,
        seed=0,
    )


def measure_libraries(
    jobs: Sequence[tuple[str, Sequence[ArgumentInfo]]],
    device_type: str,
    meter: dict[str, Any],
    plan: MeasurementPlan,
    lock_key: str,
) -> list[dict[str, Any] | str]:
    """Measure the energy of kernels, interleaved; a JSON measurement or an error text for each.

    Args:
        jobs: path and arguments of each kernel.
        device_type: ``cpu`` or ``cuda``.
        meter: which meter to open (see `open_meter`).
        plan: how to measure.
        lock_key: one measuring process at a time holds the lock of this name.
    """
    from tvm_energy.meters.lock import device_lock
    from tvm_energy.protocol import measure, measure_interleaved

    loads = [TvmLoad(*_load(path, device_type, infos, plan.seed)) for path, infos in jobs]
    with device_lock(lock_key), contextlib.closing(open_meter(meter)) as opened:
        if len(loads) == 1:
            return [measure(loads[0], opened, plan).to_json()]
        results = measure_interleaved(loads, opened, plan)
    return [
        result.to_json() if isinstance(result, EnergyMeasurement) else str(result)
        for result in results
    ]


def measure_exported(
    path: str,
    entry: str,
    arguments: Sequence[ArgumentInfo],
    device_type: str,
    meter: dict[str, Any] | None,
    plan: MeasurementPlan,
    lock_key: str,
) -> dict[str, Any]:
    """Measure a library that somebody exported; a JSON measurement, or only ``latency_s``.

    Args:
        path: a Relax executable, or a module of packed functions, written by ``export_library``.
        entry: name of the function in it.
        arguments: shape and dtype of each argument; for a packed function, outputs included.
        device_type, meter, plan, lock_key: as in `measure_libraries`; without a meter only the latency
            is measured.
    """
    import tvm

    from tvm_energy.meters.lock import device_lock
    from tvm_energy.protocol import measure

    device = tvm.runtime.device(device_type, 0)
    library = _exported(tvm.runtime.load_module(path), entry, device, len(arguments))
    tensors = _on_device(arguments, device, plan.seed)
    try:  # what is wrong shows here, before the device is locked
        library[entry](*tensors)
        device.sync()
    except Exception as exc:
        said = " ".join(str(exc).split())[:400]
        raise MeasurementError(f"{entry} cannot be run with these arguments: {said}") from exc
    with device_lock(lock_key):
        if meter is None:
            return {"latency_s": _latency_s(library, device, tensors)}
        with contextlib.closing(open_meter(meter)) as opened:
            return measure(TvmLoad(library, device, tensors), opened, plan).to_json()


def self_test_library(
    path: str,
    device_type: str,
    arguments: Sequence[ArgumentInfo],
    meter: dict[str, Any],
    load_name: str,
    seconds: float,
    lock_key: str,
) -> dict[str, Any]:
    """Compare the sensors of a device, a kernel being the load; a JSON `SelfTest`.

    Args:
        path, device_type, arguments: of the kernel, as in `run_library`.
        meter, lock_key: as in `measure_libraries`; every sensor of the meter's device is opened.
        load_name: what the kernel is, for people.
        seconds: length of each comparison.
    """
    from tvm_energy.meters.lock import device_lock
    from tvm_energy.self_test import open_sensors, self_test

    load = TvmLoad(*_load(path, device_type, arguments, seed=0))
    with device_lock(lock_key), contextlib.ExitStack() as stack:
        meters = open_sensors(lambda field: open_meter({**meter, "field": field}))
        for opened in meters.values():
            if not isinstance(opened, str):
                stack.callback(opened.close)
        return self_test(meters, load, load_name=load_name, seconds=seconds).to_json()


class _Exported:
    """One function of a module, for `TvmLoad`."""

    def __init__(self, module: Any, entry: str) -> None:
        self.entry_name = entry
        self.time_evaluator = module.time_evaluator
        self._function = module[entry]

    def __getitem__(self, name: str) -> Any:
        assert name == self.entry_name
        return self._function


def _exported(module: Any, entry: str, device: Any, given: int) -> _Exported:
    """The function, whether the module is a Relax executable or holds packed functions.

    Raises:
        ConfigurationError: it has no such function, or one with another number of arguments.
    """
    if not module.implements_function("vm_load_executable"):
        if not module.implements_function(entry, True):
            raise ConfigurationError(f"the library has no function {entry!r}; name it with --entry")
        return _Exported(module, entry)
    from tvm.runtime.vm import VirtualMachine

    machine = VirtualMachine(module, device)
    try:
        wanted = int(machine.module["get_function_arity"](entry))
    except Exception as exc:
        raise ConfigurationError(
            f"the Relax executable has no function {entry!r}; name it with --entry"
        ) from exc
    if wanted != given:
        names = [str(machine.module["get_function_param_name"](entry, i)) for i in range(wanted)]
        raise ConfigurationError(
            f"{entry} takes {wanted} argument(s) ({', '.join(names)}), but {given} were given; give "
            "--arg once for each, in that order"
        )
    return _Exported(machine.module, entry)


def _latency_s(library: Any, device: Any, tensors: list[Any]) -> float:
    evaluator = library.time_evaluator(
        library.entry_name, device, number=1, repeat=5, min_repeat_ms=100
    )
    return float(evaluator(*tensors).mean)


def open_meter(meter: dict[str, Any]) -> Any:
    """Open the meter that a dict describes.

    ``{"kind": "nvml", "uuid": ..., "field": ..., "force": ...}`` (the last two as in `open_nvml_meter`,
    and optional), ``{"kind": "rapl"}``, which has a counter alone, ``{"kind": "zeus"}``, or
    ``{"kind": "given", "meter": ...}`` with a meter or a function that opens one.

    Raises:
        MeterUnavailable: there is no such sensor.
        ConfigurationError: what was given is no meter.
    """
    if meter["kind"] == "given":
        given = meter["meter"]
        opened = given() if callable(given) else given
        if not isinstance(getattr(opened, "info", None), MeterInfo):
            raise ConfigurationError(
                f"{opened!r} is no meter: it has no MeterInfo (see docs/extending.md)"
            )
        return opened
    if meter["kind"] == "zeus":
        from tvm_energy.meters.zeus import open_zeus_meter

        return open_zeus_meter()
    if meter["kind"] == "nvml":
        from tvm_energy.meters.nvml import open_nvml_meter

        return open_nvml_meter(
            meter["uuid"], field=meter.get("field"), force=bool(meter.get("force"))
        )
    from tvm_energy.meters.rapl import open_rapl_meter

    if meter.get("field") not in (None, "counter"):
        raise MeterUnavailable("RAPL has a counter and no other sensor")
    return open_rapl_meter()


def describe_meter(meter: dict[str, Any]) -> dict[str, Any]:
    """What the meter says of itself here, where it will measure; its `MeterInfo` as JSON."""
    with contextlib.closing(open_meter(meter)) as opened:
        return dict(opened.info.to_json())


class TvmLoad:
    """A compiled kernel as a load (see `tvm_energy.meters.base.TimedLoad`).

    Launches are made by TVM's time evaluator, a loop in C++, since a Python loop could not keep a
    GPU busy with kernels of a few microseconds. It runs in a thread of its own and releases the
    interpreter lock, so that the sensor can be read while the kernels run.
    """

    def __init__(self, library: Any, device: Any, tensors: list[Any]) -> None:
        self._library = library
        self._device = device
        self._tensors = tensors
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._device_s: float | None = None

    def enqueue(self, launches: int) -> None:
        """See `Load.enqueue`."""
        self.synchronize()
        self._thread = threading.Thread(target=self._run, args=(launches,), daemon=True)
        self._thread.start()

    def synchronize(self) -> None:
        """See `Load.synchronize`; raises what the kernel raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def device_seconds(self) -> float | None:
        """See `TimedLoad.device_seconds`: by TVM's timer, which uses events on a GPU."""
        return self._device_s

    def _run(self, launches: int) -> None:
        self._device_s = None
        try:
            if launches > 1:
                # The evaluator launches once more, untimed, before it counts.
                evaluator = self._library.time_evaluator(
                    self._library.entry_name, self._device, number=launches - 1, repeat=1
                )
                timed = evaluator(*self._tensors)
                self._device_s = launches * float(timed.results[0])
            else:
                self._library[self._library.entry_name](*self._tensors)
            self._device.sync()
        except BaseException as exc:
            self._error = exc


def _load(
    path: str, device_type: str, arguments: Sequence[ArgumentInfo], seed: int
) -> tuple[Any, Any, list[Any]]:
    """The library, its device, and seeded random arguments on it (power depends on data; never zeros)."""
    import tvm

    library = tvm.runtime.load_module(path)
    device = tvm.device(device_type, 0)
    return library, device, _on_device(arguments, device, seed)


def _on_device(arguments: Sequence[ArgumentInfo], device: Any, seed: int) -> list[Any]:
    import tvm

    # TVM up to 0.19 calls a tensor an array.
    make_tensor = tvm.runtime.tensor if hasattr(tvm.runtime, "tensor") else tvm.nd.array
    return [make_tensor(values, device=device) for values in random_arguments(arguments, seed)]


def random_arguments(arguments: Sequence[ArgumentInfo], seed: int) -> list[Any]:
    """Seeded random numpy arrays: normal for floats, small integers otherwise."""
    import numpy as np

    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401  (gives numpy bfloat16 and float8)

    rng = np.random.default_rng(seed)
    arrays = []
    for shape, dtype in arguments:
        kind = np.dtype(dtype)
        if dtype.startswith(("float", "bfloat")):
            arrays.append(rng.standard_normal(shape, dtype=np.float32).astype(kind))
        elif dtype == "bool":
            arrays.append(rng.integers(0, 2, shape).astype(kind))
        else:
            arrays.append(rng.integers(0, 8, shape).astype(kind))
    return arrays


def plain_reason(error: str | None) -> str:
    """A reason as one line for people: without the traceback and the name of the exception's class."""
    first = next(iter((error or "").splitlines()), "no reason is known")
    return re.sub(r"^(\w+\.)+\w+: ", "", first)
