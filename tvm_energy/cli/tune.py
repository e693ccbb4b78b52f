"""``tvm-energy tune``: search kernels of a network, or named ones, that cost little energy."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_energy.cli.guard import (
    FAILED,
    INTERRUPTED,
    Debug,
    Force,
    Json,
    Quiet,
    Verbose,
    guarded,
    print_json,
    say,
    set_up_logging,
    stdout_for_results,
)
from tvm_energy.errors import ConfigurationError, WorkDirError
from tvm_energy.objective import DEFAULT_OBJECTIVE, parse_objective
from tvm_energy.policy import DEFAULT_POLICY

if TYPE_CHECKING:
    from tvm_energy.meta_schedule.device import TuningDevice
    from tvm_energy.replay import RunSummary

NAME = "tune"

#: Longest name of a work directory that is made up from what is tuned.
_NAME_LENGTH = 80


@guarded
def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="An .onnx or .pt2 file, onnx:NAME (such as onnx:alexnet), or "
            "torch:MODULE:FUNCTION.",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            "-w",
            help="Tune one kernel by name instead: matmul:m=1024,n=1024,k=1024. May be repeated; "
            "`tvm-energy workloads` lists them.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="auto, cpu, cuda, cuda:N, a GPU's UUID, or a simulated GPU such as sim:a100."
        ),
    ] = "auto",
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            "-o",
            help="latency, energy, edp, ed2p, energy:slack=0.05 (least energy, at most 5 % slower), "
            "weighted:eta=0.5.",
        ),
    ] = DEFAULT_OBJECTIVE,
    policy: Annotated[
        str,
        typer.Option(
            help="Which candidates have their energy measured: gain (those that can still change the "
            "winner), snr (the paper's, reconstructed), all, none, fixed:F."
        ),
    ] = DEFAULT_POLICY,
    trials: Annotated[
        int, typer.Option(min=1, help="Candidates to try in the whole run, all kernels together.")
    ] = 1000,
    trials_per_round: Annotated[
        int, typer.Option(min=1, help="Candidates to try before the models learn from them.")
    ] = 64,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where records go, and from where a run continues; named after the rest."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Makes the search repeatable; random by default.")
    ] = None,
    input_shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=1,3,224,224",
            help="Sizes of an input that the model leaves open; repeatable.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="TVM target instead of the one that fits the device.")
    ] = None,
    finalists: Annotated[
        int,
        typer.Option(min=0, help="Best kernels of each task that are measured again at the end."),
    ] = 4,
    clocks: Annotated[
        int | None,
        typer.Option(
            min=3,
            metavar="N",
            help="Choose kernel and core clock together: measure the finalists at up to N locked clocks. "
            "The slack counts from the fastest kernel at the unlocked clock.",
        ),
    ] = None,
    clock_per_kernel: Annotated[
        bool,
        typer.Option(
            "--clock-per-kernel",
            help="With --clocks: a clock for each kernel instead of one for all.",
        ),
    ] = False,
    window_s: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=600, help="Length of one energy measurement window, in seconds."
        ),
    ] = None,
    start_model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="DIR|FILE",
            help="Begin with what an earlier run on the same device learned: its work directory, or its "
            "energy_model.json.",
        ),
    ] = None,
    prior: Annotated[
        str,
        typer.Option(
            help="What the energy model is told beside the features: none, or counts (of operations and "
            "bytes, times published energies)."
        ),
    ] = "none",
    population: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="New candidates that the search looks at each round; by default 8 times --trials-per-round, 64 to 512.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tune only these kernels of the model: names with * and ?, comma between."
        ),
    ] = None,
    max_tasks: Annotated[
        int | None,
        typer.Option(min=1, help="Tune only that many kernels, the costliest of the model."),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Tune a network, or kernels by name, for an objective.

    Running the same command again continues where the last run stopped.
    """
    set_up_logging(quiet, verbose)
    from tvm_energy.energy_model.prior import check_prior

    # What can be found wrong without TVM is found now, before the seconds that its import takes.
    needs_energy = parse_objective(objective, max_power_w=1.0).needs_energy
    _check_clocks(clocks, clock_per_kernel, finalists, needs_energy, device)
    _check_policy(policy)
    known_prior = check_prior(prior)
    _check_model(start_model)
    source = Source.parse(model, workload or [], input_shape or [])
    plan = None
    if window_s is not None:
        from tvm_energy.measurement import MeasurementPlan

        plan = MeasurementPlan(window_s=window_s, budget_s=max(8.0, 8 * window_s))

    from tvm_energy.meta_schedule import compat  # noqa: F401  (refuses a TVM that would crash)
    from tvm_energy.meta_schedule.device import open_device

    with (
        stdout_for_results(),
        contextlib.closing(open_device(device, target, force=force)) as opened,
    ):
        if device == "auto" and not quiet:
            _say_device(opened)
        if work_dir is None:
            work_dir = Path(source.directory_name(opened.spec))
            if not quiet:
                say(f"Work directory: {work_dir} (choose another with --work-dir)")
        _check_work_dir(work_dir)

        from tvm_energy.cli.terminal import make_progress
        from tvm_energy.meta_schedule.tuning import TuningTask, run
        from tvm_energy.tuning_run import Interrupted

        progress = make_progress(quiet)
        try:
            run(
                [
                    TuningTask(name=task.name, mod=task.mod, weight=task.weight)
                    for task in select(source.tasks(opened.target), tasks, max_tasks)
                ],
                device=opened,
                work_dir=work_dir,
                trials=trials,
                trials_per_round=trials_per_round,
                objective=objective,
                policy=policy,
                seed=seed,
                plan=plan,
                finalists=finalists,
                clocks=clocks,
                clock_per_kernel=clock_per_kernel,
                model=start_model,
                prior=known_prior,
                population=population,
                progress=progress,
            )
        except (KeyboardInterrupt, Interrupted):
            progress.finished()
            say(f"Interrupted. What was found so far is kept in {work_dir}; continue with:")
            say(f"  tvm-energy {shlex.join(sys.argv[1:])}")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            progress.finished()
    _conclude(work_dir, as_json)


def _say_device(device: TuningDevice) -> None:
    if device.spec.startswith("sim:"):
        say(
            f"Device: {device.spec}, simulated, as no NVIDIA GPU was found whose energy can be read"
        )
    else:
        say(f"Device: {device.spec}, {device.identity['name']}")


def _conclude(work_dir: Path, as_json: bool) -> None:
    """Print what the log says; fail when no kernel at all came out of it."""
    from tvm_energy.replay import summarize

    summary = summarize(work_dir)
    _print(summary, work_dir, as_json)
    if summary.totals is None:
        say("tvm-energy: error: no kernel could be tuned; the reasons stand above")
        raise typer.Exit(FAILED)


def _print(summary: RunSummary, work_dir: Path, as_json: bool) -> None:
    from tvm_energy.cli.terminal import stdout_console
    from tvm_energy.report import print_report, to_json

    if as_json:
        print_json(to_json(summary) | {"work_dir": str(work_dir)})
    else:
        print_report(summary, stdout_console(), str(work_dir))


@dataclass(frozen=True)
class Task:
    """A task and what it costs, as far as is known before tuning."""

    name: str
    mod: Any
    weight: float
    flop: float = 0.0


@dataclass(frozen=True)
class Source:
    """What is to be tuned: a model, or workloads."""

    model: str | None
    workloads: tuple[Any, ...]
    input_shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def parse(
        cls, model: str | None, workloads: Sequence[str], input_shapes: Sequence[str]
    ) -> Source:
        """Read the arguments; only what can be found wrong without TVM is found here.

        Raises:
            ConfigurationError: not exactly one of model and workloads, or one of them is wrong.
        """
        if (model is None) == (not workloads):
            raise ConfigurationError(
                "give either a MODEL or --workload, for example: tvm-energy tune onnx:alexnet, or "
                "tvm-energy tune --workload matmul:m=1024,n=1024,k=1024"
            )
        if workloads and input_shapes:
            raise ConfigurationError("--input-shape belongs to a MODEL, not to --workload")
        if model is not None:
            from tvm_energy.meta_schedule.models import check_model

            check_model(model)
        from tvm_energy.meta_schedule.workloads import parse_workload

        parsed = {item.spec: item for item in map(parse_workload, workloads)}
        return cls(model, tuple(parsed.values()), parse_input_shapes(input_shapes))

    def directory_name(self, device: str) -> str:
        """A name that the same command gives again, and another one does not."""
        if self.model is not None:
            from tvm_energy.meta_schedule.models import model_name

            what = [model_name(self.model)]
            what += [f"{name}={shape}" for name, shape in sorted(self.input_shapes.items())]
        else:
            what = [item.spec for item in self.workloads]
        text = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(what)).strip("-.") or "model"
        if len(text) > _NAME_LENGTH:
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]
            text = f"{text[:_NAME_LENGTH]}-{digest}"
        return f"tvm-energy-{text}-{re.sub(r'[^A-Za-z0-9]+', '-', device)[:20].strip('-')}"

    def tasks(self, target: Any) -> list[Task]:
        """The kernels to be tuned."""
        if self.model is None:
            return [Task(item.spec, item.primfunc(), 1.0) for item in self.workloads]
        from tvm_energy.meta_schedule.models import open_model
        from tvm_energy.meta_schedule.networks import extract_tasks

        model = open_model(self.model, self.input_shapes)
        return [
            Task(item.name, item.mod, float(item.weight), item.flop)
            for item in extract_tasks(model.network, target)
        ]


def parse_input_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """``["data=1,3,224,224"]`` -> ``{"data": (1, 3, 224, 224)}``.

    Raises:
        ConfigurationError: naming the text that is not of this form.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        try:
            shape = tuple(int(size) for size in re.split("[,x]", sizes))
        except ValueError:
            shape = ()
        if not name or not shape or min(shape) < 1:
            raise ConfigurationError(
                f"--input-shape {text!r} is not of the form NAME=1,3,224,224 with positive sizes"
            )
        shapes[name] = shape
    return shapes


def select(tasks: list[Task], patterns: str | None, limit: int | None) -> list[Task]:
    """The tasks that the filters leave, in their order."""
    if patterns is not None:
        wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
        for pattern in wanted:
            if not any(fnmatch.fnmatchcase(task.name, pattern) for task in tasks):
                raise ConfigurationError(
                    f"--tasks: no kernel is called {pattern!r}; there are "
                    + ", ".join(task.name for task in tasks)
                )
        tasks = [
            task
            for task in tasks
            if any(fnmatch.fnmatchcase(task.name, pattern) for pattern in wanted)
        ]
    if limit is not None and limit < len(tasks):
        costliest = sorted(tasks, key=lambda task: task.weight * task.flop, reverse=True)[:limit]
        tasks = [task for task in tasks if task in costliest]
    if not tasks:
        raise ConfigurationError("there is no kernel to tune in this model")
    return tasks


def _check_policy(policy: str) -> None:
    from tvm_energy.policy import parse_policy

    parse_policy(policy)


def _check_model(model: Path | None) -> None:
    if model is not None and not model.exists():
        raise ConfigurationError(
            f"--model {model}: there is no such file or folder; give the work directory of a finished run, "
            "or its energy_model.json"
        )


def _check_clocks(
    clocks: int | None, clock_per_kernel: bool, finalists: int, needs_energy: bool, device: str
) -> None:
    if clocks is None:
        if clock_per_kernel:
            raise ConfigurationError("--clock-per-kernel needs --clocks, for example --clocks 5")
        return
    if device == "cpu":
        raise ConfigurationError(
            "--clocks: the clock of a CPU is not locked by tvm-energy; leave it out, or give a GPU or a "
            "simulated device such as --device sim:a100"
        )
    from tvm_energy.clock_search import check_clocks

    check_clocks(clocks, finalists, needs_energy)


def _check_work_dir(work_dir: Path) -> None:
    """Found wrong now rather than after the model is loaded."""
    if work_dir.exists() and not work_dir.is_dir():
        raise WorkDirError(f"{work_dir} is a file, not a directory; choose another --work-dir")
