"""``tvm-energy compile``: a network and a log become a shared library."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_energy.cli.guard import (
    FAILED,
    Debug,
    Json,
    guarded,
    print_json,
    say,
    set_up_logging,
    stdout_for_results,
)
from tvm_energy.errors import ConfigurationError, MeterUnavailable, TvmEnergyError

if TYPE_CHECKING:
    from tvm_energy.measurement import EnergyMeasurement
    from tvm_energy.meta_schedule.compiling import Compiled, Verdict
    from tvm_energy.meta_schedule.models import Model

NAME = "compile"


@guarded
def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="An .onnx or .pt2 file, torch:MODULE:FUNCTION, or onnx:NAME (such as "
            "onnx:alexnet), which gets random weights.",
        ),
    ],
    log: Annotated[
        Path,
        typer.Option("--log", "-l", metavar="DIR", help="A work directory, or an exported folder."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The library to write: model.so.")
    ],
    target: Annotated[
        str | None, typer.Option(help="TVM target instead of the one that the log is for.")
    ] = None,
    input_shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=1,3,224,224",
            help="Sizes of an input that the model leaves open; repeatable.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Run the library against ONNX Runtime or torch, and measure it where there is a meter.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs that --verify makes.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile a network with the kernels that a log chose.

    A table tells which kernels came from the log, and why others did not.
    """
    set_up_logging()
    from tvm_energy.ansor_log import is_ansor_only
    from tvm_energy.cli.tune import parse_input_shapes

    shapes = parse_input_shapes(input_shape or [])
    if not log.exists():
        raise ConfigurationError(
            f"{log} does not exist; give the --work-dir of a `tvm-energy tune` run, or an export"
        )
    if is_ansor_only(log):
        raise ConfigurationError(
            f"{log} is a run of legacy Ansor, whose log names no network; in that TVM take its kernels with "
            f"tvm_energy.ansor.apply_best, or write a log for ApplyHistoryBest: "
            f"tvm-energy export {log} --to best.json"
        )
    from tvm_energy.meta_schedule.models import ZOO_PREFIX, check_model, open_model

    check_model(model)
    with stdout_for_results():
        from tvm_energy.meta_schedule import compiling

        compiling.check_library_path(output)
        # The zoo's own weights are all alike: every network would compute a constant.
        loaded = open_model(model, shapes, seed=seed)
        if model.startswith(ZOO_PREFIX):
            say(f"{model} has no trained weights; random ones are put in")
        compiled = compiling.compile_from_log(loaded.network, log, target)
        compiling.write_library(compiled, output)
        verdict, measured, unverified, unmeasured = None, None, None, None
        if verify:
            verdict, unverified = _verify(loaded, compiled, output, seed)
            measured, unmeasured = _measure(compiled, output)
    result = to_json(compiled, output, verdict, measured, unverified, unmeasured)
    if as_json:
        print_json(result)
    else:
        _print(result, compiled, output, verify, verdict, measured, unverified, unmeasured)
    if verdict is not None and not verdict.ok:
        say("tvm-energy: error: the compiled network does not compute what the reference does")
        raise typer.Exit(FAILED)


def _verify(
    model: Model, compiled: Compiled, output: Path, seed: int
) -> tuple[Verdict | None, str | None]:
    from tvm_energy.meta_schedule.compiling import compare_outputs, runnable

    library, reason = runnable(compiled, output)
    if library is None:
        return None, reason
    inputs = library.network.random_inputs(seed)
    return compare_outputs(library.run(inputs), model.reference(inputs), model.reference_name), None


def _measure(compiled: Compiled, output: Path) -> tuple[EnergyMeasurement | None, str | None]:
    from tvm_energy.kernels.workers import open_meter
    from tvm_energy.measurement import MeasurementPlan
    from tvm_energy.meta_schedule.compiling import measure_network, runnable
    from tvm_energy.meters.lock import device_lock

    library, reason = runnable(compiled, output)
    if library is None:
        return None, reason
    uuid = str(compiled.manifest["device"].get("uuid"))
    cpu = library.target.kind.name == "llvm"
    try:
        with (
            contextlib.closing(
                open_meter({"kind": "rapl"} if cpu else {"kind": "nvml", "uuid": uuid})
            ) as meter,
            device_lock(meter.info.device_uuid),
            _locked(compiled),
        ):
            return measure_network(library, meter, MeasurementPlan()), None
    except (MeterUnavailable, TvmEnergyError) as exc:
        return None, str(exc)


def _locked(compiled: Compiled) -> contextlib.AbstractContextManager[object]:
    """Hold the clock for which the kernels were chosen; without permission only a warning."""
    clocks = {item.get("clock_mhz") for item in compiled.manifest["kernels"]}
    if len(clocks) != 1 or clocks == {None}:
        return contextlib.nullcontext()
    from tvm_energy.clocks import locked_clocks
    from tvm_energy.manifest import clock_of

    clock_mhz = clock_of(compiled.manifest)
    assert clock_mhz is not None
    return locked_clocks(clock_mhz, device=str(compiled.manifest["device"].get("uuid")))


def _at_clock(compiled: Compiled) -> str:
    """At which locked clock the log's promise holds."""
    clocks = {item.get("clock_mhz") for item in compiled.manifest["kernels"]} - {None}
    if not clocks:
        return ""
    return f" at {clocks.pop():g} MHz" if len(clocks) == 1 else " with a clock for each kernel"


def to_json(
    compiled: Compiled,
    output: Path,
    verdict: Verdict | None,
    measured: EnergyMeasurement | None,
    unverified: str | None,
    unmeasured: str | None,
) -> dict[str, Any]:
    """What was compiled, as JSON values."""
    import dataclasses

    from tvm_energy.meta_schedule.compiling import holds_cuda_source

    promise = compiled.promise
    return {
        "output": str(output),
        "target": str(compiled.network.target),
        "holds_cuda_source": holds_cuda_source(output),
        "simulated": compiled.simulated,
        "objective": compiled.manifest["objective"],
        "kernels": [dataclasses.asdict(kernel) for kernel in compiled.kernels],
        "promise": None if promise is None else dataclasses.asdict(promise),
        "verdict": None
        if verdict is None
        else {
            **dataclasses.asdict(verdict),
            # Infinity, of outputs whose shapes differ, is no JSON.
            "largest_error": None
            if verdict.largest_error == float("inf")
            else verdict.largest_error,
        },
        "not_verified": unverified,
        "measured": None if measured is None else measured.to_json(),
        "not_measured": unmeasured,
    }


def _print(
    result: dict[str, Any],
    compiled: Compiled,
    output: Path,
    verify: bool,
    verdict: Verdict | None,
    measured: EnergyMeasurement | None,
    unverified: str | None,
    unmeasured: str | None,
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from tvm_energy.cli.terminal import stdout_console
    from tvm_energy.report import format_quantity, printable, simulated_banner

    console = stdout_console()
    if compiled.simulated:
        console.print(Text(simulated_banner(str(compiled.manifest["device"].get("uuid")))))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("kernel", "schedule", "calls", "time", "energy", "why not from the log"):
        table.add_column(
            heading, justify="right" if heading in ("calls", "time", "energy") else "left"
        )
    for item in compiled.kernels:
        table.add_row(
            Text(printable(item.name)),
            item.origin,
            "" if item.calls is None else f"{item.calls:g}",
            "" if item.latency_s is None else format_quantity(item.latency_s, "s"),
            "" if item.energy_j is None else format_quantity(item.energy_j, "J"),
            Text(printable(item.reason or "")),
        )
    console.print(table, highlight=False)
    say_all = [
        f"{output}: {_count(compiled)} from the log, for {compiled.network.target.kind.name}"
    ]
    promise = compiled.promise
    if promise is None:
        say_all.append("None of its kernels is in the log: was the log made for another network?")
    else:
        energy = (
            "" if promise.energy_j is None else f" and {format_quantity(promise.energy_j, 'J')}"
        )
        rest = "" if promise.complete else "; kernels that are not from the log come on top"
        say_all.append(
            f"The log promises {format_quantity(promise.latency_s, 's')}{energy} for one pass"
            f"{_at_clock(compiled)}{rest}"
        )
    if result["holds_cuda_source"]:
        say_all.append(
            "The CUDA toolkit is not here, so the library holds its kernels as CUDA source; "
            "to deploy it, run this command where the toolkit is"
        )
    if verdict is not None:
        agrees = "agrees" if verdict.ok else "DISAGREES"
        say_all.append(
            f"The library {agrees} with {verdict.reference}: largest difference "
            f"{verdict.largest_error:.2g}, largest value {verdict.largest_value:.2g}"
        )
        if verdict.constant:
            say_all.append("All outputs are one number, so that this proves little")
    if measured is not None:
        say_all.append(
            f"Measured end to end: {format_quantity(measured.latency_s, 's')} and "
            f"{format_quantity(measured.energy_j, 'J')} ± {format_quantity(measured.stderr_j, 'J')}"
        )
        if promise is not None and promise.energy_j:
            say_all.append(
                f"That is {measured.energy_j / promise.energy_j:.2f} times the joules promised"
            )
    if verify and unverified:
        say_all.append(f"Not run: {unverified}")
    if verify and unmeasured and unmeasured != unverified:
        say_all.append(f"Not measured: {unmeasured}")
    for line in say_all:
        console.print(Text(printable(line)), highlight=False, soft_wrap=True)


def _count(compiled: Compiled) -> str:
    from tvm_energy.meta_schedule.compiling import FROM_LOG

    tuned = sum(item.origin == FROM_LOG for item in compiled.kernels)
    return f"{tuned} of {len(compiled.kernels)} kernels"
