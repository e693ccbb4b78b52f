"""``tvm-energy replay``: choose again among recorded kernels, or decide again what is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_energy.cli.guard import FAILED, Debug, Json, guarded, print_json, set_up_logging
from tvm_energy.cli.report import ClockChoice, show
from tvm_energy.errors import ConfigurationError

NAME = "replay"


@guarded
def command(
    work_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="WORK_DIR...", help="Work directories of tune runs; only read."),
    ],
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            "-o",
            help="latency, energy, edp, ed2p, energy:slack=0.05, weighted:eta=0.5; "
            "by default that of the last run.",
        ),
    ] = None,
    slack: Annotated[
        float | None,
        typer.Option("--slack", help="Short for --objective energy:slack=..., 0.05 is 5 %."),
    ] = None,
    clock_choice: ClockChoice = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="Let a policy (all, none, fixed:0.25, snr ...) decide again what is measured; "
            "may be given several times.",
        ),
    ] = None,
    steps: Annotated[
        bool,
        typer.Option(
            "--steps",
            help="Show every round; without --policy: work out the recorded decisions again and "
            "compare (exit code 1 when something differs).",
        ),
    ] = False,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Rank several logs as one; refused when device, clocks or measuring differ.",
        ),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Rank recorded runs again under an objective, or study policies, without hardware."""
    set_up_logging()
    if slack is not None:
        if objective is not None:
            raise ConfigurationError("give --slack or --objective, not both")
        objective = f"energy:slack={slack:g}"
    if policies or steps:
        if together:
            raise ConfigurationError("--together cannot be combined with --policy or --steps")
        if clock_choice is not None:
            raise ConfigurationError("--clock-choice cannot be combined with --policy or --steps")
        _policies(work_dirs, policies or [], objective, steps, as_json)
    elif len(work_dirs) == 1:
        show(work_dirs[0], objective, as_json, clock_choice)
    else:
        if clock_choice is not None:
            raise ConfigurationError("--clock-choice is for one log; give one WORK_DIR")
        _several(work_dirs, objective, together, as_json)


def _several(work_dirs: list[Path], objective: str | None, together: bool, as_json: bool) -> None:
    """Several logs: one after the other with what tells them apart, or as one."""
    from tvm_energy.cli.terminal import stdout_console
    from tvm_energy.logs.load import differences
    from tvm_energy.replay import summarize, summarize_together
    from tvm_energy.report import print_report, printable, to_json

    if together:
        summaries = [summarize_together(work_dirs, objective)]
        names = [" + ".join(map(str, work_dirs))]
    else:
        summaries = [summarize(work_dir, objective) for work_dir in work_dirs]
        names = list(map(str, work_dirs))
    notes = [
        {"logs": [names[0], name], "differences": reasons}
        for name, summary in zip(names[1:], summaries[1:], strict=True)
        if (reasons := differences(summaries[0].header, summary.header))
    ]
    if as_json:
        reports = [
            {"work_dir": name, **to_json(summary)}
            for name, summary in zip(names, summaries, strict=True)
        ]
        print_json({"logs": reports, "not_comparable": notes})
        return
    console = stdout_console()
    for name, summary in zip(names, summaries, strict=True):
        typer.echo(printable(f"== {name}"))
        print_report(summary, console)
    for note in notes:
        typer.echo(
            printable(
                f"Not ranked together: {' and '.join(note['logs'])} differ in "
                f"{', '.join(note['differences'])}."
            )
        )


def _policies(
    work_dirs: list[Path], policies: list[str], objective: str | None, steps: bool, as_json: bool
) -> None:
    from tvm_energy.cli.log_tables import render_policies, render_steps
    from tvm_energy.cli.terminal import stdout_console, working
    from tvm_energy.policy_replay import replay_policy, to_json
    from tvm_energy.report import printable

    console = stdout_console()
    results, differences = [], 0
    wanted: list[str | None] = [*policies] or [None]
    for work_dir in work_dirs:
        with working(f"replaying {work_dir}"):
            replays = [replay_policy(work_dir, policy, objective) for policy in wanted]
        differences += sum(replay.differences for replay in replays)
        results.append(
            {
                "work_dir": str(work_dir),
                "replays": [to_json(replay, steps=steps) for replay in replays],
            }
        )
        if as_json:
            continue
        if replays[0].simulated:
            typer.echo("SIMULATED: no real joules were measured")
        for replay in replays if steps else []:
            typer.echo(printable(f"== {work_dir}, policy {replay.policy}, {replay.objective}"))
            for part in render_steps(replay):
                console.print(part, highlight=False)
        if policies:
            typer.echo(printable(f"{work_dir}, objective {replays[0].objective}:"))
            for part in render_policies(replays):
                console.print(part, highlight=False)
            typer.echo(
                "Predictions are those of the recorded run. “missing”: kernels that the policy "
                "wanted and whose energy the log does not have; regret: cost of the choice above "
                "that of the best measured kernel of the log."
            )
        else:
            typer.echo(
                f"{len(replays[0].steps)} rounds worked out again, the choice itself checked in "
                f"{replays[0].choices_checked}: {replays[0].differences} differences."
            )
    if as_json:
        print_json({"logs": results})
    if differences:
        raise typer.Exit(FAILED)
