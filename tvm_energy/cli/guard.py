"""What all commands share: common options, errors as one line, interruption, JSON, logging."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ParamSpec

import typer

from tvm_energy.errors import ConfigurationError, TvmEnergyError

P = ParamSpec("P")

FAILED, USAGE, INTERRUPTED = 1, 2, 130

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the Python traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show errors and results only.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Use a GPU divided by MIG; its energy is that of the whole GPU, all tenants.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log every step to stderr.")]


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn the errors that we raise on purpose into one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except TvmEnergyError as exc:
            if kwargs.get("debug"):
                raise
            fail(str(exc), USAGE if isinstance(exc, ConfigurationError) else FAILED)
        except BrokenPipeError:
            # The reader of a pipe has seen enough (`| head`). Python would complain again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except OSError as exc:
            if kwargs.get("debug"):
                raise
            fail(f"{exc.strerror or exc}{f': {exc.filename}' if exc.filename else ''}", FAILED)
        except KeyboardInterrupt:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None

    return run


def fail(message: str, code: int) -> None:
    """Print an error and leave with an exit code."""
    say(f"tvm-energy: error: {message}")
    raise typer.Exit(code)


def say(text: str) -> None:
    """One line to stderr."""
    typer.echo(text, err=True)


def print_json(values: dict[str, Any]) -> None:
    """One JSON object as one line on stdout."""
    typer.echo(json.dumps(values, allow_nan=False))


@contextlib.contextmanager
def stdout_for_results() -> Iterator[None]:
    """Send to stderr what others print on stdout meanwhile, C++ included.

    TVM logs on stdout, where a script expects nothing but the results.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def set_up_logging(quiet: bool = False, verbose: bool = False) -> None:
    """Send this package's log to stderr: warnings by default."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    log = logging.getLogger("tvm_energy")
    log.handlers[:] = [handler]
    log.setLevel(logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING)
