"""MetaSchedule's logs into ``logs/`` of the work directory, and nothing of them on the terminal.

The files have the names that stock MetaSchedule gives them. Its own function for this also copies
everything to stdout, which is where results go, and fails when it is called again in one process
after its handlers were touched.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

_PREFIX = "tvm.s_tir.meta_schedule"
_FORMAT = logging.Formatter("%(asctime)s [%(levelname)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")

#: Longest part of a task's name in a file name, as in stock MetaSchedule.
_NAME_LENGTH = 100


def open_loggers(work_dir: Path, names: Sequence[str]) -> list[logging.Logger]:
    """One logger for each task, writing to a file of its own; the scheduler's log goes to another."""
    folder = work_dir / "logs"
    folder.mkdir(exist_ok=True)
    _to_file(logging.getLogger(_PREFIX), folder / f"{_PREFIX}.logging.task_scheduler.log")
    digits = len(str(max(0, len(names) - 1)))
    loggers = []
    for index, name in enumerate(names):
        safe = "".join(c if c.isalnum() or c in "_-+." else "_" for c in name)[:_NAME_LENGTH]
        logger = logging.getLogger(f"{_PREFIX}.logging.task_{index:0{digits}d}_{safe}")
        _to_file(logger, folder / f"{logger.name}.log")
        loggers.append(logger)
    return loggers


def close_loggers() -> None:
    """Close every file that `open_loggers` opened, and leave the loggers as they were."""
    for name in list(logging.Logger.manager.loggerDict):
        if name == _PREFIX or name.startswith(f"{_PREFIX}.logging.task_"):
            logger = logging.getLogger(name)
            _remove_handlers(logger)
            logger.setLevel(logging.NOTSET)
            logger.propagate = True


def _to_file(logger: logging.Logger, path: Path) -> None:
    _remove_handlers(logger)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_FORMAT)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False


def _remove_handlers(logger: logging.Logger) -> None:
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
