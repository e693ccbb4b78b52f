"""``tvm-energy dvfs plan`` and ``partition``: decisions on a table of blocks over clocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_energy.cli.guard import (
    Debug,
    Json,
    guarded,
    print_json,
    say,
    set_up_logging,
    stdout_for_results,
)
from tvm_energy.errors import ConfigurationError

if TYPE_CHECKING:
    from tvm_energy.dvfs.block_file import BlockFile
    from tvm_energy.dvfs.partition import Split
    from tvm_energy.dvfs.plan import ClockPlan, Goal

_SCALE = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}

Source = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="CSV or JSON table (columns block, clock_mhz, latency_ms, power_w or energy_mj), "
        "or a network (onnx:NAME, an .onnx or .pt2 file, torch:MODULE:FUNCTION), simulated with "
        "--device.",
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="Simulated device for a network: sim:orin-nano, ...")
]
Blocks = Annotated[int, typer.Option("--blocks", min=1, help="Most blocks of a network.")]


@guarded
def plan(
    source: Source,
    deadline: Annotated[
        str | None, typer.Option("--deadline", help="Least energy within this time, such as 20ms.")
    ] = None,
    edp: Annotated[
        bool, typer.Option("--edp", help="Least energy-delay product (the default).")
    ] = False,
    price: Annotated[
        str | None,
        typer.Option("--time-price", help="Least E + price x T; such as 15W (joules a second)."),
    ] = None,
    per_block: Annotated[
        bool, typer.Option("--per-block", help="One clock for each block instead of one for all.")
    ] = False,
    switch_time: Annotated[
        str, typer.Option("--switch-time", help="Delay of one change of clock.")
    ] = "0s",
    switch_energy: Annotated[
        str, typer.Option("--switch-energy", help="Energy of one change of clock.")
    ] = "0J",
    device: Device = "sim:orin-nano",
    blocks: Blocks = 16,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the Pareto front into this file.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Choose clocks: least energy for a deadline, least EDP, or a price on time."""
    set_up_logging()
    from tvm_energy.dvfs import plan as planning

    goals: list[Goal] = []
    if deadline is not None:
        goals.append(planning.Deadline(quantity(deadline, "s", "--deadline")))
    if price is not None:
        goals.append(planning.PricedTime(quantity(price, "W", "--time-price")))
    if edp or not goals:
        goals.append(planning.EnergyDelay())
    if len(goals) > 1:
        raise ConfigurationError("give one of --deadline, --edp and --time-price")
    switching = planning.Switching(
        quantity(switch_time, "s", "--switch-time"), quantity(switch_energy, "J", "--switch-energy")
    )
    data = _load(source, device, None, blocks)
    table = data.file.table
    options: dict[str, Any] = {"per_block": per_block, "switching": switching}
    chosen = planning.plan(table, goals[0], **options)
    points = planning.front(table, **options)
    if plot is not None:
        _plot_front(plot, points, chosen, data.note)
    if as_json:
        print_json(
            {
                "simulated": data.simulated,
                "blocks": list(table.blocks),
                "plan": asdict(chosen),
                "front": [asdict(point) for point in points],
            }
        )
        return
    _print_plan(table.blocks, chosen, points, data.note)


@guarded
def partition(
    source: Source,
    deadline: Annotated[str, typer.Option("--deadline", help="Time limit, such as 50ms.")],
    input_size: Annotated[
        str | None,
        typer.Option("--input", help="Size of the network's input, such as 600kB; for a table."),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", help="Of the channel, such as 10MHz.")
    ] = None,
    gain_db: Annotated[
        float | None, typer.Option("--gain-db", help="Power gain of the channel, such as -100.")
    ] = None,
    noise_dbm: Annotated[
        float, typer.Option("--noise-dbm-hz", help="Noise power density, dBm/Hz.")
    ] = -174.0,
    power: Annotated[
        str, typer.Option("--power", help="Highest transmit power; with --rate the power drawn.")
    ] = "200mW",
    rate: Annotated[
        str | None, typer.Option("--rate", help="A fixed rate instead, such as 50Mbit/s.")
    ] = None,
    devices: Annotated[
        Path | None,
        typer.Option(
            "--devices",
            help="Table of devices that share the bandwidth: name, gain_db and, where they differ, "
            "deadline_ms, max_power_w.",
        ),
    ] = None,
    input_on_server: Annotated[
        bool, typer.Option("--input-on-server", help="The server has the input too.")
    ] = False,
    idle_power: Annotated[
        str, typer.Option("--idle-power", help="Drawn while the device does not compute.")
    ] = "0W",
    answer: Annotated[
        str, typer.Option("--answer-time", help="Until the server's answer has arrived.")
    ] = "0s",
    device: Device = "sim:orin-nano",
    server: Annotated[
        str, typer.Option("--server", help="Simulated server for a network.")
    ] = "sim:a100",
    blocks: Blocks = 16,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Choose split point, device clock and transmit power: least device energy within a deadline."""
    set_up_logging()
    import numpy as np

    from tvm_energy.dvfs.bandwidth import share_bandwidth
    from tvm_energy.dvfs.channel import Channel, FixedRate, RadioChannel
    from tvm_energy.dvfs.partition import PartitionTask
    from tvm_energy.dvfs.partition import partition as split_network

    watts = quantity(power, "W", "--power")
    channel: Channel
    if rate is not None:
        if devices or bandwidth or gain_db is not None:
            raise ConfigurationError("--rate goes without --bandwidth, --gain-db and --devices")
        channel = FixedRate(rate_bps=quantity(rate, "bit/s", "--rate"), power_w_sending=watts)
    elif bandwidth is None or (gain_db is None and devices is None):
        raise ConfigurationError("give --bandwidth and --gain-db, or --rate")
    else:
        channel = RadioChannel(
            bandwidth_hz=quantity(bandwidth, "Hz", "--bandwidth"),
            gain=0.0 if gain_db is None else _ratio(gain_db),
            noise_w_per_hz=_ratio(noise_dbm) * 1e-3,
            max_power_w=watts,
        )
    data = _load(source, device, server, blocks)
    if data.file.output_bits is None or data.file.server_s is None:
        raise ConfigurationError(
            f"{source} needs the columns output_bytes and server_ms for every block"
        )
    first = quantity(input_size, "B", "--input") * 8 if input_size else data.input_bits
    if first is None:
        raise ConfigurationError("give --input, the size of the network's input, such as 600kB")
    task = PartitionTask(
        table=data.file.table,
        cut_bits=np.concatenate([[first], data.file.output_bits]),
        server_s=data.file.server_s,
        channel=channel,
        deadline_s=quantity(deadline, "s", "--deadline"),
        input_on_server=input_on_server,
        answer_s=quantity(answer, "s", "--answer-time"),
        idle_power_w=quantity(idle_power, "W", "--idle-power"),
    )
    values: dict[str, Any] = {"simulated": data.simulated}
    if devices is None:
        splits = [split_network(task)]
    else:
        assert isinstance(channel, RadioChannel)
        shared = share_bandwidth(_each_device(devices, task, channel), channel.bandwidth_hz)
        splits = list(shared.splits)
        values |= {"energy_j": shared.energy_j, "lower_bound_j": shared.lower_bound_j}
    if as_json:
        rows = [{**asdict(split), "latency_s": split.latency_s} for split in splits]
        print_json({**values, "blocks": list(task.table.blocks), "devices": rows})
        return
    _print_splits(task.table.blocks, splits, data.note)
    if devices is not None:
        typer.echo(
            f"all devices: {_show(values['energy_j'], 'J')}, "
            f"no plan can need less than {_show(values['lower_bound_j'], 'J')}"
        )


def quantity(text: str, unit: str, option: str) -> float:
    """A number with its unit, in base units: ``20ms`` -> 0.02.

    Raises:
        ConfigurationError: no number, or another unit or none.
    """
    found = re.fullmatch(r"\s*([-+.\deE]*?[\d.])\s*([nuµmkMG]?)" + re.escape(unit) + r"\s*", text)
    try:
        if found:
            return float(found[1]) * _SCALE[found[2]]
    except ValueError:
        pass
    raise ConfigurationError(
        f"{option} must be a number with its unit, such as 20m{unit} or 20{unit}; got {text!r}"
    )


def _ratio(decibel: float) -> float:
    try:
        return float(10 ** (decibel / 10))
    except OverflowError:
        raise ConfigurationError(f"{decibel} dB is out of range") from None


# ---- input ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Data:
    file: BlockFile
    input_bits: float | None
    simulated: bool
    note: str


def _load(source: str, device: str, server: str | None, most: int) -> _Data:
    if source.startswith(("onnx:", "torch:")) or source.endswith((".onnx", ".pt2")):
        return _simulated_network(source, device, server, most)
    from tvm_energy.dvfs.block_file import read_block_file

    return _Data(read_block_file(Path(source)), None, False, "")


def _simulated_network(source: str, device: str, server: str | None, most: int) -> _Data:
    from tvm_energy.simulation.devices import find_device

    # Wrong names first: importing TVM takes seconds.
    spec, far = find_device(device), find_device(server) if server else None
    say(f"Reading {source}, dividing it into blocks, and simulating them ...")
    with stdout_for_results():
        import numpy as np

        from tvm_energy.dvfs.block_file import BlockFile
        from tvm_energy.dvfs.clock_table import clock_table
        from tvm_energy.meta_schedule.blocks import simulated_network, time_blocks
        from tvm_energy.meta_schedule.models import open_model

        network = open_model(source).network
        blocks, works, times = simulated_network(network, spec, most)
        far_s = time_blocks(works, far).latency_s[:, -1] if far else None
    table = clock_table(
        times.clocks_mhz,
        times.latency_s,
        energy_j=times.energy_j,
        blocks=[block.name for block in blocks],
    )
    bits = np.array([8.0 * block.output_bytes for block in blocks])
    note = f"simulated: {network.name} on {spec.full_name}"
    if far:
        note += f", server {far.full_name}"
    return _Data(BlockFile(table, bits, far_s), 8.0 * blocks[0].input_bytes, True, note)


def _each_device(path: Path, task: Any, channel: Any) -> list[Any]:
    from dataclasses import replace

    from tvm_energy.dvfs.block_file import read_rows

    tasks = []
    for number, row in enumerate(read_rows(path, ("gain",))):
        own = replace(
            channel,
            gain=_ratio(row["gain"]),
            max_power_w=row.get("max_power", channel.max_power_w),
        )
        name = row.get("name", f"device {number}")
        deadline_s = row.get("deadline", task.deadline_s)
        tasks.append(replace(task, name=name, channel=own, deadline_s=deadline_s))
    return tasks


# ---- output ---------------------------------------------------------------------------------------


def _show(value: float, unit: str) -> str:
    from tvm_energy.report import format_quantity

    return format_quantity(value, unit)


def _print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from tvm_energy.cli.terminal import stdout_console

    table = Table(title=title or None, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    stdout_console().print(table)


def _print_plan(
    names: Sequence[str], chosen: ClockPlan, points: Sequence[ClockPlan], note: str
) -> None:
    from tvm_energy.report import printable

    if note:
        typer.echo(note)
    clocks = chosen.clocks_mhz
    if len(set(clocks)) == 1:
        typer.echo(f"clock: {clocks[0]:g} MHz")
    else:
        pairs = zip(names, clocks, strict=True)
        _print_table(
            "", ("block", "clock"), [(printable(name), f"{mhz:g} MHz") for name, mhz in pairs]
        )
    switches = f", {chosen.switches} changes of clock" if chosen.switches else ""
    typer.echo(
        f"latency {_show(chosen.latency_s, 's')}, energy {_show(chosen.energy_j, 'J')}{switches}"
    )
    _print_table(
        "Pareto front",
        ("clock", "latency", "energy"),
        [
            (_range(point.clocks_mhz), _show(point.latency_s, "s"), _show(point.energy_j, "J"))
            for point in points
        ],
    )


def _range(clocks: Sequence[float]) -> str:
    low, high = min(clocks), max(clocks)
    return f"{low:g} MHz" if low == high else f"{low:g} to {high:g} MHz"


def _print_splits(names: Sequence[str], splits: Sequence[Split], note: str) -> None:
    from tvm_energy.report import printable

    if note:
        typer.echo(note)
    _print_table(
        "",
        ("device", "runs itself", "clock", "sends", "power", "latency", "energy"),
        [
            (
                printable(split.name),
                f"{split.local_blocks} of {len(names)} blocks",
                "-" if split.clock_mhz is None else f"{split.clock_mhz:g} MHz",
                f"{split.sent_bits / 8e3:.3g} kB",
                _show(split.transmit_power_w, "W"),
                _show(split.latency_s, "s"),
                _show(split.energy_j, "J"),
            )
            for split in splits
        ],
    )


def _plot_front(path: Path, points: Sequence[ClockPlan], chosen: ClockPlan, note: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            'plots need matplotlib; pip install "tvm-energy[report]"'
        ) from error
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [1e3 * point.latency_s for point in points],
        [1e3 * point.energy_j for point in points],
        "o-",
        label="Pareto front",
    )
    axes.plot([1e3 * chosen.latency_s], [1e3 * chosen.energy_j], "r*", ms=14, label="chosen")
    axes.set_xlabel("latency (ms)")
    axes.set_ylabel("energy (mJ)")
    if note:
        axes.set_title(note, fontsize="small")
    axes.legend()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigurationError(f"{path} cannot be drawn: {error}") from error
