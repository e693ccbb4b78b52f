"""``tvm-energy dvfs``: commands about clock frequencies."""

from __future__ import annotations

import typer

from tvm_energy.cli import dvfs_plan

NAME = "dvfs"

app = typer.Typer(
    help="Plan clocks, and split networks between a device and a server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("plan")(dvfs_plan.plan)
app.command("partition")(dvfs_plan.partition)
