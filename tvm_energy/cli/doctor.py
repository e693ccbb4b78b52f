"""``tvm-energy doctor``: what is here, what is missing, what to do, and whether sensors can be believed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

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
from tvm_energy.errors import ConfigurationError, MeterUnavailable

if TYPE_CHECKING:
    from tvm_energy.doctor import Finding
    from tvm_energy.self_test import SelfTest

NAME = "doctor"


@guarded
def command(
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Also compare the sensors at idle and under load (about half a minute a device). The "
            "result decides which sensor later runs use, and stands in their logs.",
        ),
    ] = False,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            "-d",
            help="Device of --self-test, once for each: cuda:N, a GPU's UUID, cpu, or a simulated GPU "
            "such as sim:a100. Default: all visible GPUs, else the processor.",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check versions, devices and meters, and say what is missing and how to get it."""
    from tvm_energy.doctor import diagnose, self_test_findings

    set_up_logging()
    if device and not self_test:
        raise ConfigurationError("--device belongs to --self-test")
    findings = diagnose()
    results = _self_tests(device or _default_devices()) if self_test else []
    for result in results:
        findings += self_test_findings(result)
    healthy = all(finding.severity != "error" for finding in findings)
    if as_json:
        values = {"ok": healthy, "findings": [dataclasses.asdict(item) for item in findings]}
        if self_test:
            values["self_tests"] = [result.to_json() for result in results]
        print_json(values)
    else:
        _print(findings)
    if not healthy:
        raise typer.Exit(FAILED)


def _self_tests(devices: list[str]) -> list[SelfTest]:
    from tvm_energy.doctor import run_self_test

    results = []
    for device in devices:
        say(f"Self-test of {device}: idle, then under load ...")
        with stdout_for_results():
            results.append(run_self_test(device))
    return results


def _default_devices() -> list[str]:
    from tvm_energy.meters.nvml import list_gpus
    from tvm_energy.meters.nvml_devices import visible_gpus
    from tvm_energy.meters.rapl import open_rapl_meter

    try:
        gpus = [gpu.uuid for gpu in visible_gpus(list_gpus()) if gpu.problem is None]
        if gpus:
            return gpus
        reason = "no GPU can be measured"
    except MeterUnavailable as exc:
        reason = str(exc)
    try:
        open_rapl_meter().close()
    except MeterUnavailable as exc:
        raise MeterUnavailable(
            f"there is no sensor to test ({reason}; {exc}); try it on a simulated one: "
            "tvm-energy doctor --self-test --device sim:a100"
        ) from exc
    return ["cpu"]


def _print(findings: list[Finding]) -> None:
    for item in findings:
        typer.echo(f"{item.severity:>7}  {item.topic}: {item.text}")
        if item.remedy:
            typer.echo(f"{'':>7}  -> {item.remedy}")
