"""``tvm-energy measure``: energy and latency of one thing, without tuning."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_energy.cli.guard import (
    Debug,
    Force,
    Json,
    Quiet,
    guarded,
    print_json,
    say,
    set_up_logging,
    stdout_for_results,
)
from tvm_energy.errors import ConfigurationError, MeterUnavailable

if TYPE_CHECKING:
    from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
    from tvm_energy.meters.base import PowerMeter
    from tvm_energy.stretch import DeviceEnergy

NAME = "measure"


@guarded
def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]", help="A command to run: its energy from start to end."
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            "-w",
            help="A kernel by name, with TVM's default schedule, such as matmul:m=1024.",
        ),
    ] = None,
    library: Annotated[
        Path | None,
        typer.Option(
            help="A .so written by export_library: a Relax executable, or packed functions. Its code "
            "runs on this machine."
        ),
    ] = None,
    entry: Annotated[str, typer.Option(help="The function of --library to measure.")] = "main",
    argument: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            help="Shape and type of one argument of the function, as 1,3,224,224:float32; once for "
            "each, in order. For a packed function outputs count too.",
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            "-d",
            help="auto, cpu, cuda, cuda:N or a GPU's UUID; for a workload also a simulated GPU such as "
            "sim:a100. For a command: every device to read, once for each (default: all GPUs "
            "that CUDA_VISIBLE_DEVICES shows, and the processor).",
        ),
    ] = None,
    idle: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds of idle power measured before, for energy net of idle; 0 leaves it out.",
        ),
    ] = 3.0,
    window_s: Annotated[
        float | None,
        typer.Option(min=0.05, help="Length of a measuring window of a kernel, in seconds."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the JSON object to this file.")
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the energy and time of a kernel, a compiled library or a whole command.

    A command's own output stays on stdout, the result goes to stderr, and its exit code is passed on.
    With --json the result alone is on stdout, and the command's output goes to stderr.
    """
    set_up_logging(quiet)
    given = [
        name
        for name, value in (
            ("a command", arguments),
            ("--workload", workload),
            ("--library", library),
        )
        if value
    ]
    if len(given) != 1:
        raise ConfigurationError(
            f"give one thing to measure, not {len(given)}: -- COMMAND, --workload or --library; for "
            "example: tvm-energy measure --workload matmul:m=1024,n=1024,k=1024 --device sim:a100"
        )
    if argument and not library:
        raise ConfigurationError("--arg belongs to --library")
    if output is not None and not output.parent.is_dir():
        raise ConfigurationError(f"--output {output}: the directory {output.parent} does not exist")
    if arguments:
        code, result = _measure_command(arguments, device, idle, force, quiet, as_json)
    else:
        if len(device or ()) > 1:
            raise ConfigurationError("a kernel runs on one device; give --device once")
        plan = _plan(window_s, idle > 0)
        name = device[0] if device else "auto"
        if workload:
            result = _measure_workload(workload, name, plan, force)
        else:
            assert library is not None
            result = _measure_library(library, entry, argument or [], name, plan, force)
        code = 0
        if not as_json:
            _print_kernel(result)
    if output is not None:
        output.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(result)
    raise typer.Exit(code)


# ---- kernels ----------------------------------------------------------------------------------


def _plan(window_s: float | None, net_of_idle: bool) -> MeasurementPlan:
    from tvm_energy.measurement import MeasurementPlan

    if window_s is None:
        return MeasurementPlan(net_of_idle=net_of_idle)
    return MeasurementPlan(
        window_s=window_s, budget_s=max(8.0, 8 * window_s), net_of_idle=net_of_idle
    )


def _measure_workload(spec: str, device: str, plan: MeasurementPlan, force: bool) -> dict[str, Any]:
    from tvm_energy.meta_schedule.workloads import parse_workload

    workload = parse_workload(spec)
    from tvm_energy.meta_schedule import compat  # noqa: F401  (refuses a TVM that would crash)
    from tvm_energy.meta_schedule.default_schedule import build_default, measure_artifact
    from tvm_energy.meta_schedule.device import RealDevice, open_device

    with stdout_for_results(), contextlib.closing(open_device(device, force=force)) as opened:
        kernel = build_default(workload, opened)
        measured: EnergyMeasurement | float
        if opened.meter is None and isinstance(opened, RealDevice):
            measured = opened.latency(kernel.artifact)
        else:
            measured = measure_artifact(kernel.artifact, opened, plan)
        return {
            "workload": workload.spec,
            "schedule": kernel.schedule,
            "device": opened.spec,
            "device_name": opened.identity["name"],
            **_kernel_values(measured, opened.no_meter_reason),
        }


def _measure_library(
    path: Path, entry: str, texts: Sequence[str], device: str, plan: MeasurementPlan, force: bool
) -> dict[str, Any]:
    from tvm_energy.meta_schedule import compat  # noqa: F401  (refuses a TVM that would crash)
    from tvm_energy.meta_schedule.default_schedule import check_library, parse_argument
    from tvm_energy.meta_schedule.device import RealDevice, open_device

    check_library(path)
    arguments = [parse_argument(text) for text in texts]
    with stdout_for_results(), contextlib.closing(open_device(device, force=force)) as opened:
        if not isinstance(opened, RealDevice):
            raise ConfigurationError(
                f"{opened.spec} is simulated and cannot run a compiled library; use --device cpu or "
                "cuda, or measure a --workload"
            )
        measured = opened.measure_exported(str(path.resolve()), entry, arguments, plan)
        return {
            "library": str(path),
            "entry": entry,
            "device": opened.spec,
            "device_name": opened.identity["name"],
            **_kernel_values(measured, opened.no_meter_reason),
        }


def _kernel_values(measured: EnergyMeasurement | float, reason: str) -> dict[str, Any]:
    """Gross and net energy a launch; `energy_j` of a net measurement is net."""
    if isinstance(measured, float):
        return {"energy_j": None, "latency_s": measured, "reason": reason, "simulated": False}
    idle_w = measured.idle_power_w
    idle_j = 0.0 if idle_w is None else idle_w * measured.latency_s
    return {
        "energy_j": measured.energy_j + idle_j,
        "stderr_j": measured.stderr_j,
        "net_energy_j": None if idle_w is None else measured.energy_j,
        "idle_power_w": idle_w,
        "latency_s": measured.latency_s,
        "mean_power_w": (measured.energy_j + idle_j) / measured.latency_s,
        "simulated": measured.simulated,
        "measurement": measured.to_json(),
    }


def _print_kernel(result: dict[str, Any]) -> None:
    from tvm_energy.report import format_quantity, printable, simulated_banner

    if result["simulated"]:
        typer.echo(simulated_banner(result["device"]))
    what = result.get("workload") or f"{result['entry']} of {result['library']}"
    schedule = f", schedule: {result['schedule']}" if "schedule" in result else ""
    typer.echo(f"{printable(what)} on {printable(result['device_name'])}{schedule}")
    typer.echo(f"  latency  {format_quantity(result['latency_s'], 's')}")
    if result["energy_j"] is None:
        typer.echo("  energy   not measured")
        say(f"tvm-energy: warning: no energy was measured: {result['reason']}")
        return
    error = format_quantity(2 * result["stderr_j"], "J")
    typer.echo(f"  energy   {format_quantity(result['energy_j'], 'J')} ± {error} a launch (gross)")
    if result["net_energy_j"] is not None:
        net, idle = result["net_energy_j"], result["idle_power_w"]
        typer.echo(
            f"           {format_quantity(net, 'J')} ± {error} net of {idle:.1f} W when idle"
        )
    measured = result["measurement"]
    clock = "" if measured["clock_mhz"] is None else f" at {measured['clock_mhz']:.0f} MHz"
    typer.echo(f"  power    {result['mean_power_w']:.1f} W{clock}")
    typer.echo(
        f"  from     {measured['windows']} windows, {measured['window_s']:.2f} s, "
        f"{measured['sensor_updates']} sensor updates ({measured['meter']} {measured['method']}, "
        f"scope {measured['scope']}); quality: {measured['quality']}"
    )
    typer.echo("  ± is twice the standard error (95 %)")


# ---- commands ---------------------------------------------------------------------------------


def _measure_command(
    arguments: Sequence[str],
    devices: Sequence[str] | None,
    idle_s: float,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> tuple[int, dict[str, Any]]:
    from tvm_energy.cli.run_command import RunningCommand, check_command
    from tvm_energy.stretch import StretchRecorder

    check_command(arguments)
    with contextlib.ExitStack() as stack:
        meters = _open_meters(devices, force, stack)
        if not quiet:
            _announce(meters, idle_s)
        recorder = StretchRecorder(meters)
        if idle_s:
            recorder.measure_idle(idle_s)
        sys.stdout.flush()
        start_s = recorder.begin()
        running = RunningCommand(arguments, stdout=sys.stderr.fileno() if as_json else None)
        with running.with_signals():
            end_s = recorder.follow(running.wait)
        results = recorder.finish(start_s, end_s)
    values = {
        "command": list(arguments),
        "exit_code": running.exit_code,
        "seconds": end_s - start_s,
        "devices": [item.to_json() for item in results],
        "gpu_energy_j": _sum(results, "energy_j"),
        "gpu_net_energy_j": _sum(results, "net_energy_j"),
    }
    if not as_json:
        _print_command(values, results)
    return running.exit_code, values


def _open_meters(
    devices: Sequence[str] | None, force: bool, stack: contextlib.ExitStack
) -> list[PowerMeter]:
    """Open every sensor that the command may move; refuse to run it when there is none."""
    from tvm_energy.meters.lock import lock_owner

    meters: list[PowerMeter] = []
    reasons = []
    for name in devices or ("visible", "cpu"):
        try:
            opened = _open_named(name, force)
        except MeterUnavailable as exc:
            if devices:
                raise
            reasons.append(str(exc))
            continue
        for meter in opened:
            stack.callback(meter.close)
            meters.append(meter)
    if not meters:
        raise MeterUnavailable(
            "there is no energy meter here, so the command was not run: " + "; ".join(reasons)
        )
    for meter in meters:
        for note in meter.info.notes:
            if meter.info.meter == "nvml":
                say(f"tvm-energy: warning: {meter.info.device_name}: {note}")
        owner = lock_owner(meter.info.device_uuid)
        if owner is not None:
            say(
                f"tvm-energy: warning: process {owner or 'of somebody else'} measures on "
                f"{meter.info.device_name} at the same time; its kernels count too"
            )
    return meters


def _open_named(name: str, force: bool) -> list[PowerMeter]:
    from tvm_energy.meters.nvml import list_gpus
    from tvm_energy.meters.nvml_devices import visible_gpus
    from tvm_energy.self_test import open_tested_meter

    if name == "cpu":
        from tvm_energy.meters.rapl import open_rapl_meter

        return [open_rapl_meter()]
    if name in ("visible", "auto"):
        gpus = visible_gpus(list_gpus(), force=force)
        if not gpus:
            raise MeterUnavailable("NVML knows no GPU; check that nvidia-smi -L lists one")
        with contextlib.ExitStack() as undo:
            meters: list[PowerMeter] = []
            for gpu in gpus:
                meter, _ = open_tested_meter(gpu.uuid, force=force)
                undo.callback(meter.close)
                meters.append(meter)
            undo.pop_all()
        return meters
    if name == "cuda" or name.startswith(("cuda:", "GPU-", "MIG-")):
        which = name.removeprefix("cuda").removeprefix(":")
        wanted = int(which) if which.isdecimal() else which or None
        return [open_tested_meter(wanted, force=force)[0]]
    if name.startswith("sim:"):
        raise ConfigurationError(
            f"{name} is simulated and cannot run a command; measure a --workload on it"
        )
    raise ConfigurationError(
        f"unknown device {name!r}; for a command use cpu, cuda, cuda:N or a GPU's UUID"
    )


def _announce(meters: Sequence[PowerMeter], idle_s: float) -> None:
    names = ", ".join(meter.info.device_name for meter in meters)
    say(f"Measuring {names}" + (f"; idle power first, {idle_s:g} s" if idle_s else ""))


def _sum(results: Sequence[DeviceEnergy], name: str) -> float | None:
    """Over GPUs; None where one of them could not be measured, or there is none."""
    values = [getattr(item, name) for item in results if item.scope == "gpu"]
    return sum(values) if values and None not in values else None


def _print_command(values: dict[str, Any], results: Sequence[DeviceEnergy]) -> None:
    from tvm_energy.report import format_quantity, printable

    say("")
    say(f"{values['seconds']:.3f} s, exit code {values['exit_code']}")
    for item in results:
        name = printable(f"{item.device_name} ({item.scope}, {item.meter} {item.method})")
        if item.energy_j is None:
            say(f"  {name}: no energy: {item.quality}")
            continue
        assert item.stderr_j is not None
        line = (
            f"  {name}: {format_quantity(item.energy_j, 'J')} ± "
            f"{format_quantity(2 * item.stderr_j, 'J')} gross"
        )
        if item.net_energy_j is not None and item.net_stderr_j is not None:
            line += (
                f", {format_quantity(item.net_energy_j, 'J')} ± "
                f"{format_quantity(2 * item.net_stderr_j, 'J')} net of "
                f"{item.idle_power_w:.1f} W when idle"
            )
        say(f"{line}; mean {item.mean_power_w:.1f} W")
        if item.quality != "good":
            say(f"    {item.quality}")
    if sum(item.scope == "gpu" for item in results) > 1 and values["gpu_energy_j"] is not None:
        say(f"  all GPUs: {format_quantity(values['gpu_energy_j'], 'J')} gross")
    say("  ± is twice the standard error (95 %)")
