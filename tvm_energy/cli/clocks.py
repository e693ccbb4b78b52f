"""``tvm-energy clocks``: what runs at which clock, and letting go of a clock that stayed locked."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_energy.cli.guard import FAILED, Debug, Json, guarded, print_json, say

if TYPE_CHECKING:
    from tvm_energy.clocks import LeftLocked

NAME = "clocks"

app = typer.Typer(
    help="Show the clocks of NVIDIA GPUs, or release those that a killed run left locked.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Device = Annotated[
    str | None,
    typer.Option("--device", "-d", help="Only this GPU: its number in nvidia-smi, or its UUID."),
]


@app.command("show")
@guarded
def show(
    device: Device = None,
    supported: Annotated[
        bool,
        typer.Option(
            help="List the clocks that can be locked. On some cards (RTX 5070 Ti) this query hangs "
            "the machine."
        ),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the clocks of every GPU now, and what a run of tvm-energy has locked."""
    from tvm_energy.clocks import left_locked

    locked = {state.device_uuid: state for state in left_locked()}
    rows = [_row(uuid, locked.get(uuid), supported) for uuid in _uuids(device)]
    if as_json:
        print_json({"gpus": rows})
        return
    for row in rows:
        _print_row(row)


@app.command("restore")
@guarded
def restore(
    device: Device = None,
    force: Annotated[
        bool, typer.Option(help="Release also what a process that still runs has locked.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Release the clocks that a killed run left locked; with --device, those of that GPU in any case."""
    from tvm_energy.clocks import left_locked, restore_clocks
    from tvm_energy.errors import TvmEnergyError

    uuids = [state.device_uuid for state in left_locked()] if device is None else _uuids(device)
    restored, problems = [], {}
    for uuid in uuids:
        try:
            restore_clocks(uuid, force=force)
            restored.append(uuid)
        except TvmEnergyError as exc:
            problems[uuid] = str(exc)
    if as_json:
        print_json({"restored": restored, "problems": problems})
    else:
        for uuid in restored:
            typer.echo(f"{uuid}: released")
        if not uuids:
            typer.echo("No run of tvm-energy has left a clock locked.")
    for uuid, problem in problems.items():
        say(f"tvm-energy: error: {uuid}: {problem}")
    if problems:
        raise typer.Exit(FAILED)


def _uuids(device: str | None) -> list[str]:
    from tvm_energy.meters.nvml import list_gpus
    from tvm_energy.meters.nvml_devices import choose

    gpus = list_gpus()
    if device is not None:
        name = device.removeprefix("cuda:")
        gpus = [choose(gpus, int(name) if name.isdecimal() else name)[0]]
    return [gpu.uuid for gpu in gpus if gpu.uuid]


def _row(uuid: str, state: LeftLocked | None, supported: bool) -> dict[str, Any]:
    from tvm_energy.meters.nvml_clocks import open_clock_control

    with contextlib.closing(open_clock_control(uuid)) as control:
        now = control.state()
        row: dict[str, Any] = {
            "uuid": uuid,
            "name": control.device_name,
            "clock_mhz": now.clock_mhz,
            "max_clock_mhz": control.max_mhz(),
            "memory_mhz": control.memory_mhz(),
            "throttle_reasons": list(now.throttle_reasons),
            "locked_by_tvm_energy": None if state is None else dataclasses.asdict(state),
        }
        if supported:
            row["supported_mhz"] = control.supported_mhz()
    return row


def _print_row(row: dict[str, Any]) -> None:
    clock, highest, memory = (
        "unknown" if row[name] is None else f"{row[name]:.0f} MHz"
        for name in ("clock_mhz", "max_clock_mhz", "memory_mhz")
    )
    typer.echo(f"{row['name']} ({row['uuid']}): core {clock} of at most {highest}, memory {memory}")
    if row["throttle_reasons"]:
        typer.echo(f"    limited by: {', '.join(row['throttle_reasons'])}")
    state = row["locked_by_tvm_energy"]
    if state is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state["since"]))
        holder = "runs" if state["alive"] else "is gone; release it with: tvm-energy clocks restore"
        typer.echo(
            f"    locked at {state['clock_mhz']} MHz since {since} by process {state['pid']}, "
            f"which {holder}"
        )
    for memory_mhz, clocks in row.get("supported_mhz", {}).items():
        typer.echo(f"    with memory at {memory_mhz} MHz: {', '.join(map(str, clocks))}")
