"""What runs in worker processes: timing and measuring built kernels.

Everything that enters or leaves these functions is plain data. A worker that crashes or hangs is
killed and replaced by its pool, and costs one candidate.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan

#: Shape and dtype of one argument of a kernel.
ArgumentInfo = tuple[tuple[int, ...], str]


def prepare_worker(environment: dict[str, str]) -> None:
    """Runs once in each new worker process, before any device is touched."""
    os.environ.update(environment)
    import tvm  # noqa: F401


def run_library(
    path: str,
    device_type: str,
    arguments: Sequence[ArgumentInfo],
    *,
    number: int,
    repeat: int,
    min_repeat_ms: int,
    hopeless_s: float,
    seed: int,
    preprocess: str = "",
) -> list[float]:
    """Time one kernel; seconds a launch, one number for each repeat.

    Args:
        path: shared library made by the adapter.
        device_type: ``cpu`` or ``cuda``.
        arguments: shapes and dtypes of the kernel's arguments.
        number, repeat, min_repeat_ms: as in MetaSchedule's ``EvaluatorConfig``.
        hopeless_s: a kernel slower than this in a first short run is not timed any longer; its short
            timing is returned.
        seed: of the data in the arguments.
        preprocess: name of the TVM function that is called before each repeat, or nothing.
    """
    library, device, tensors = _load(path, device_type, arguments, seed)
    probe = library.time_evaluator(library.entry_name, device, number=1, repeat=1)
    first_s = float(probe(*tensors).results[0])
    if first_s > hopeless_s:
        return [first_s]
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


def open_meter(meter: dict[str, Any]) -> Any:
    """Open the meter that a dict describes: ``{"kind": "nvml", "uuid": ...}`` or ``{"kind": "rapl"}``."""
    if meter["kind"] == "nvml":
        from tvm_energy.meters.nvml import open_nvml_meter

        return open_nvml_meter(meter["uuid"])
    from tvm_energy.meters.rapl import open_rapl_meter

    return open_rapl_meter()


class TvmLoad:
    """A compiled kernel as a load (see `tvm_energy.meters.base.Load`).

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

    def _run(self, launches: int) -> None:
        try:
            if launches > 1:
                # The evaluator launches once more, untimed, before it counts.
                evaluator = self._library.time_evaluator(
                    self._library.entry_name, self._device, number=launches - 1, repeat=1
                )
                evaluator(*self._tensors)
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
    # TVM up to 0.19 calls a tensor an array.
    make_tensor = tvm.runtime.tensor if hasattr(tvm.runtime, "tensor") else tvm.nd.array
    tensors = [make_tensor(values, device=device) for values in random_arguments(arguments, seed)]
    return library, device, tensors


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
