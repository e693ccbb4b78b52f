"""``tvm-energy dvfs``: latency, power and energy over the core clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_energy.cli import dvfs_plan
from tvm_energy.cli.guard import (
    Debug,
    Json,
    Quiet,
    guarded,
    print_json,
    say,
    set_up_logging,
    stdout_for_results,
)
from tvm_energy.errors import ConfigurationError

if TYPE_CHECKING:
    from tvm_energy.dvfs.curve import FittedCurve
    from tvm_energy.dvfs.study import Study
    from tvm_energy.dvfs.sweep import Point, Sweep
    from tvm_energy.dvfs.table import Table
    from tvm_energy.meta_schedule.networks import Network

NAME = "dvfs"

app = typer.Typer(
    help="Latency, power and energy over the core clock: measure, fit, plan.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("plan")(dvfs_plan.plan)
app.command("partition")(dvfs_plan.partition)

By = Annotated[
    list[str] | None,
    typer.Option(
        help="Column that tells workloads apart (kernel, block, memory clock); repeatable."
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="WHAT=NAME",
        help="Name of a column that is not recognised: clock=..., effective=..., time=..., power=... "
        "or energy=...; repeatable.",
    ),
]
Units = Annotated[
    list[str] | None,
    typer.Option(
        "--unit",
        metavar="WHAT=UNIT",
        help="Unit of a column whose name does not say it: clock=MHz, time=ms, power=mW, energy=mJ; "
        "repeatable.",
    ),
]
PowerLimit = Annotated[
    float | None,
    typer.Option("--power-limit", min=0.1, help="Power limit of the device in watts, where known."),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        help="Draw latency, power and energy into this file (.png, .svg, .pdf); with several workloads "
        "one file each, numbered. Needs matplotlib."
    ),
]


@app.command("fit")
@guarded
def fit(
    table: Annotated[
        Path,
        typer.Argument(
            metavar="TABLE", help="CSV or JSON file with clock, time, and power or energy columns."
        ),
    ],
    by: By = None,
    column: Columns = None,
    unit: Units = None,
    latency_form: Annotated[
        str | None,
        typer.Option(
            help="cpu, offset, power, shifted or table; cross-validation chooses by default."
        ),
    ] = None,
    power_form: Annotated[
        str | None,
        typer.Option(help="cubic, static, ridge or table; cross-validation chooses by default."),
    ] = None,
    power_limit: PowerLimit = None,
    plot: Plot = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fit latency and power over the clock to a table of measurements."""
    set_up_logging()
    from tvm_energy.dvfs.study import study

    read = _read(table, by, column, unit)
    studies = study(
        read.series,
        latency_form=latency_form,
        power_form=power_form,
        power_limit_w=power_limit,
    )
    if as_json:
        print_json(
            {"reading": list(read.reading), "workloads": [_study_json(one) for one in studies]}
        )
    else:
        for line in read.reading:
            typer.echo(line)
        for one in studies:
            typer.echo("")
            _print_study(one)
    _plot(studies, plot, str(table))


@app.command("sweep")
@guarded
def sweep(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="An .onnx file, or onnx:NAME (such as onnx:alexnet): its blocks are measured.",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            "-w",
            help="Kernel to measure, in TVM's default schedule: matmul:m=1024,n=1024,k=1024; repeatable. "
            "`tvm-energy workloads` lists them.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="sim:a100 or another simulated GPU, cuda, cuda:N, or a GPU's UUID."),
    ] = "sim:a100",
    table: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="TABLE", help="Play a table of measurements back instead of a device."
        ),
    ] = None,
    blocks: Annotated[
        int, typer.Option(min=1, help="Blocks that a MODEL is divided into at most.")
    ] = 16,
    by: By = None,
    column: Columns = None,
    unit: Units = None,
    max_clocks: Annotated[
        int, typer.Option(min=3, help="Clocks to measure at most; the others are predicted.")
    ] = 8,
    regret: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Stop when the chosen clock can waste no more energy than this share.",
        ),
    ] = 0.01,
    power_limit: PowerLimit = None,
    plot: Plot = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the measured points to this CSV file.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure workloads at few clocks, predict the others, and choose the clock of least energy.

    The next clock is the one of least predicted energy, or one beside it; measuring stops when the choice
    cannot become better by more than --regret, after five clocks at the earliest.
    """
    set_up_logging(quiet)
    if sum((table is not None, bool(workload), model is not None)) != 1:
        raise ConfigurationError(
            "give either --workload or --from TABLE or a MODEL, for example: "
            "tvm-energy dvfs sweep --workload matmul:m=1024,n=1024,k=1024 --device sim:a100"
        )
    if table is not None:
        result, source = _sweep_table(
            table, by, column, unit, max_clocks, regret, power_limit, quiet
        )
    else:
        result, source = _sweep_device(
            workload or [], model, blocks, device, max_clocks, regret, power_limit, quiet
        )
    if save is not None:
        _save(result, save, "workload" if model is None else "block")
    if as_json:
        print_json(
            {
                "source": source,
                "order_mhz": list(result.order_mhz),
                "regret": _finite(result.regret),
                "certain": result.certain,
                "workloads": [_study_json(one) for one in result.studies],
            }
        )
    else:
        _print_sweep(result, source, regret)
    _plot(result.studies, plot, source)


# ---- where values come from -----------------------------------------------------------------------


def _read(
    path: Path, by: list[str] | None, column: list[str] | None, unit: list[str] | None
) -> Table:
    from tvm_energy.dvfs.table import read_table

    return read_table(
        path,
        columns=_pairs(column or [], "--column", ("clock", "effective", "time", "power", "energy")),
        units=_pairs(unit or [], "--unit", ("clock", "effective", "time", "power", "energy")),
        by=by or (),
    )


def _pairs(texts: Sequence[str], option: str, allowed: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        what, _, name = text.partition("=")
        if what not in allowed or not name:
            raise ConfigurationError(
                f"{option} {text!r} is not of the form WHAT=... with WHAT one of {', '.join(allowed)}"
            )
        pairs[what] = name
    return pairs


def _sweep_table(
    path: Path,
    by: list[str] | None,
    column: list[str] | None,
    unit: list[str] | None,
    max_clocks: int,
    regret: float,
    power_limit: float | None,
    quiet: bool,
) -> tuple[Sweep, str]:
    from tvm_energy.dvfs.sweep import Recorded
    from tvm_energy.dvfs.sweep import sweep as run

    read = _read(path, by, column, unit)
    if not quiet:
        for line in read.reading:
            say(line)
    recorded = Recorded(read.series)
    result = run(
        recorded.clock_mhz,
        [one.name for one in read.series],
        recorded,
        recorded.measure,
        max_clocks=max_clocks,
        regret=regret,
        power_limit_w=power_limit,
        measured=_silent if quiet else _tell,
    )
    return result, f"{path}, played back"


def _sweep_device(
    workloads: Sequence[str],
    model: str | None,
    blocks: int,
    device: str,
    max_clocks: int,
    regret: float,
    power_limit: float | None,
    quiet: bool,
) -> tuple[Sweep, str]:
    from tvm_energy.dvfs.sweep import sweep as run
    from tvm_energy.meta_schedule.workloads import parse_workload

    specs = [parse_workload(text) for text in workloads]
    if not device.startswith(("sim:", "cuda", "GPU-", "MIG-")):
        raise ConfigurationError(
            f"the clock of {device!r} cannot be locked; use a GPU, or a simulated one such as sim:a100"
        )
    with stdout_for_results():
        from tvm_energy.meta_schedule.clock_sweep import open_sweep

        network = None if model is None else _network(model)
        with open_sweep(device, specs, network, blocks) as opened:
            if not quiet:
                say(opened.title)
            result = run(
                opened.clock_mhz,
                opened.names,
                opened,
                opened.measure,
                max_clocks=max_clocks,
                regret=regret,
                power_limit_w=opened.power_limit_w if power_limit is None else power_limit,
                measured=_silent if quiet else _tell,
            )
            return result, opened.title


def _network(model: str) -> Network:
    from tvm_energy.meta_schedule.networks import load_onnx, onnx_model_zoo_path

    name = model.removeprefix("onnx:")
    return load_onnx(model if name == model else onnx_model_zoo_path(name))


def _tell(clock_mhz: float, points: Sequence[Point]) -> None:
    energy = sum(point.latency_s * point.power_w for point in points)
    say(f"measured at {clock_mhz:g} MHz: {energy:.4g} J in all")


def _silent(clock_mhz: float, points: Sequence[Point]) -> None:
    pass


# ---- results --------------------------------------------------------------------------------------


def _print_sweep(result: Sweep, source: str, regret: float) -> None:
    typer.echo(source)
    clocks = ", ".join(f"{clock:g}" for clock in result.order_mhz)
    typer.echo(f"measured {len(result.order_mhz)} clocks [MHz]: {clocks}")
    if result.certain:
        typer.echo(f"no other clock can save more than {100 * regret:g} % energy")
    elif math.isfinite(result.regret):
        typer.echo(
            f"another clock might still save up to {100 * result.regret:.2g} % energy; "
            "measure more with --max-clocks"
        )
    else:
        typer.echo("too few clocks to say how good the choice is; measure more with --max-clocks")
    for one in result.studies:
        typer.echo("")
        _print_study(one)


def _print_study(one: Study) -> None:
    if one.series.name:
        typer.echo(one.series.name)
    _print_curve("latency", "s", one.latency)
    if one.power is not None:
        _print_curve("power", "W", one.power)
    cap = one.latency.cap_mhz
    if math.isfinite(cap):
        typer.echo(f"  effective clock: rises no further than {cap:.0f} MHz, whatever is requested")
    if one.energy is None:
        typer.echo("  energy: unknown, the table has neither power nor energy")
        return
    energy = one.energy
    at = energy.chosen
    top = len(energy.clock_mhz) - 1
    saved = 1 - energy.energy_j[at] / energy.energy_j[top]
    latency = one.latency.predict(energy.clock_mhz)
    typer.echo(
        f"  least energy: {energy.energy_j[at]:.4g} J (± {energy.half_width_j[at]:.2g}) at "
        f"{energy.clock_mhz[at]:g} MHz; against {energy.clock_mhz[top]:g} MHz {100 * saved:.1f} % "
        f"less energy, {100 * (latency[at] / latency[top] - 1):.1f} % more time"
    )


def _print_curve(what: str, unit: str, curve: FittedCurve) -> None:
    error = curve.left_out_error
    left_out = "" if math.isnan(error) else f", error left out {100 * error:.2g} %"
    typer.echo(f"  {what} [{unit}], f in MHz: {curve.form}, {curve.formula}{left_out}")
    intervals = curve.intervals()
    for name, (low, high) in intervals.items():
        typer.echo(f"    {name} = {curve.coefficients[name]:.5g}  (95 %: {low:.4g} .. {high:.4g})")
    others = {
        name: value
        for name, value in curve.left_out.items()
        if name != curve.form and not math.isnan(value)
    }
    if others:
        compared = ", ".join(f"{name} {100 * value:.2g} %" for name, value in others.items())
        typer.echo(f"    other forms, error left out: {compared}")


def _study_json(one: Study) -> dict[str, Any]:
    values: dict[str, Any] = {"name": one.series.name, "latency": _curve_json(one.latency)}
    values["power"] = None if one.power is None else _curve_json(one.power)
    values["energy"] = None
    if one.energy is not None:
        latency, energy = one.latency.predict(one.energy.clock_mhz), one.energy
        values["energy"] = {
            "clock_mhz": energy.clock_mhz.tolist(),
            "energy_j": energy.energy_j.tolist(),
            "half_width_j": [_finite(value) for value in energy.half_width_j.tolist()],
            "latency_s": latency.tolist(),
            "chosen_mhz": float(energy.clock_mhz[energy.chosen]),
            "chosen_energy_j": float(energy.energy_j[energy.chosen]),
            "regret": _finite(energy.regret),
        }
    return values


def _curve_json(curve: FittedCurve) -> dict[str, Any]:
    return {
        "form": curve.form,
        "formula": curve.formula,
        "coefficients": dict(curve.coefficients),
        "intervals": {
            name: [_finite(low), _finite(high)] for name, (low, high) in curve.intervals().items()
        },
        "cap_mhz": _finite(curve.cap_mhz),
        "residual": curve.rms,
        "left_out": {name: _finite(value) for name, value in curve.left_out.items()},
        "clock_mhz": curve.clock_mhz.tolist(),
        "values": curve.values.tolist(),
    }


def _finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if math.isfinite(value) else None


def _save(result: Sweep, path: Path, what: str) -> None:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([what, "clock_mhz", "effective_clock_mhz", "latency_s", "power_w"])
        for one in result.studies:
            points = one.series
            assert points.power_w is not None
            columns = (points.clock_mhz, points.effective_mhz, points.latency_s, points.power_w)
            for row in zip(*(column.tolist() for column in columns), strict=True):
                writer.writerow([points.name, *row])


def _plot(studies: Sequence[Study], path: Path | None, title: str) -> None:
    if path is None:
        return
    from tvm_energy.dvfs.plot import plot_study

    for number, one in enumerate(studies, start=1):
        name = path if len(studies) == 1 else path.with_stem(f"{path.stem}-{number}")
        plot_study(one, name, f"{title}: {one.series.name}" if one.series.name else title)
        say(f"drawn: {name}")
