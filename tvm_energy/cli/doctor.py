"""``tvm-energy doctor``: what is here, what is missing, what to do."""

from __future__ import annotations

import dataclasses

import typer

from tvm_energy.cli.guard import FAILED, Debug, Json, guarded, print_json

NAME = "doctor"


@guarded
def command(as_json: Json = False, debug: Debug = False) -> None:
    """Check versions, devices and meters, and say what is missing and how to get it."""
    from tvm_energy.doctor import diagnose

    findings = diagnose()
    healthy = all(finding.severity != "error" for finding in findings)
    if as_json:
        print_json({"ok": healthy, "findings": [dataclasses.asdict(item) for item in findings]})
    else:
        for item in findings:
            typer.echo(f"{item.severity:>7}  {item.topic}: {item.text}")
            if item.remedy:
                typer.echo(f"{'':>7}  -> {item.remedy}")
    if not healthy:
        raise typer.Exit(FAILED)
