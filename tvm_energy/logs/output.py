"""Files that appear whole or not at all, and never in the place of one that is there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tvm_energy.errors import ConfigurationError, WorkDirError


@contextlib.contextmanager
def new_file(path: Path, *, newline: str | None = "\n") -> Iterator[IO[str]]:
    """A text file that gets its name when the block ends well; else nothing is left.

    Raises:
        ConfigurationError: something of that name is there already.
        WorkDirError: it cannot be written.
    """
    with (
        new_path(path) as temporary,
        open(temporary, "w", encoding="utf-8", newline=newline) as file,
    ):
        yield file


@contextlib.contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes ``path`` when the block ends well; else nothing is left.

    Raises:
        ConfigurationError, WorkDirError: see `new_file`.
    """
    refuse_existing(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as exc:
        raise WorkDirError(f"cannot write {path}: {exc.strerror}") from exc
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        try:
            os.link(temporary, path)  # unlike a rename, it fails where the name has been taken
        except FileExistsError:
            refuse_existing(path)
        except OSError:  # a file system without hard links
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_existing(path: Path) -> None:
    """Nothing is overwritten.

    Raises:
        ConfigurationError: naming the path.
    """
    if os.path.lexists(path):
        raise ConfigurationError(f"{path} exists already; choose another name or remove it first")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
