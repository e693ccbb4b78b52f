"""``tvm-energy workloads``: the kernels that ``tune --workload`` knows by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from tvm_energy.cli.guard import Debug, Json, guarded, print_json

if TYPE_CHECKING:
    from tvm_energy.meta_schedule.workloads import Parameter, WorkloadSpec

NAME = "workloads"


@guarded
def command(as_json: Json = False, debug: Debug = False) -> None:
    """List the workloads that `tune --workload` knows, with their parameters."""
    from tvm_energy.meta_schedule.workloads import WORKLOADS

    if as_json:
        print_json({"workloads": [_as_json(spec) for spec in WORKLOADS.values()]})
        return
    for spec in WORKLOADS.values():
        typer.echo(f"{spec.name}: {spec.summary}")
        width = max((len(_usage(item)) for item in spec.parameters), default=0)
        for item in spec.parameters:
            typer.echo(f"    {_usage(item):{width}}  {_meaning(item)}")
    name, parameters = next((spec.name, spec.parameters) for spec in WORKLOADS.values())
    example = ",".join(_usage(item) for item in parameters if not item.choices)
    typer.echo(f"\nExample: tvm-energy tune --workload {name}:{example} --device sim:a100")


def _usage(item: Parameter) -> str:
    return item.name if item.default is None else f"{item.name}={item.default}"


def _meaning(item: Parameter) -> str:
    if item.choices:
        return f"{item.meaning} ({', '.join(item.choices)})"
    return f"{item.meaning} (at least {item.minimum})" if item.minimum != 1 else item.meaning


def _as_json(spec: WorkloadSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "summary": spec.summary,
        "parameters": [
            {
                "name": item.name,
                "meaning": item.meaning,
                "default": item.default,
                "minimum": None if item.choices else item.minimum,
                "maximum": None if item.choices else item.maximum,
                "choices": list(item.choices),
            }
            for item in spec.parameters
        ],
    }
