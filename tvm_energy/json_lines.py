r"""Files of one JSON value a line. They may come from strangers: reading one is bounded in memory and time.

Lines end with ``\n`` alone and hold UTF-8. A killed run leaves at most one unfinished line, the last,
since lines are appended and flushed whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tvm_energy.errors import RecordFormatError, WorkDirError

logger = logging.getLogger(__name__)

#: Longest line of records, in bytes; ours have about a thousand.
LONGEST_LINE = 2**22
#: Longest line of a stock database: a workload's module may carry constants.
LONGEST_STOCK_LINE = 2**28

_BLOCK = 2**16


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe or a device could keep a reader waiting for ever.

    Raises:
        WorkDirError: it is something else than a file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise WorkDirError(f"cannot read {path}: it is not a file")
    return open(descriptor, "rb")


def refuse_link_out(path: Path) -> None:
    """Refuse a link that leads out of its folder: a folder from elsewhere must not reach other files.

    Raises:
        WorkDirError: naming the link.
    """
    if not path.is_symlink():
        return
    try:
        path.stat()
        inside = path.resolve().is_relative_to(path.parent.resolve())
    except FileNotFoundError:  # it leads to nothing; a file may be made there
        inside = path.resolve().is_relative_to(path.parent.resolve())
    except OSError:  # a ring of links, which resolve() passes over since Python 3.13
        inside = False
    if not inside:
        raise WorkDirError(
            f"{path} is a link that leads out of its directory; put the file itself there"
        )


def read_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[tuple[int, bytes]]:
    """Numbers (from 1) and bytes of the lines, newline included; blank lines are left out.

    Of a line longer than ``longest`` only the beginning is kept, so that `parse_line` refuses it.

    Raises:
        WorkDirError: it is not a regular file.
        OSError: it cannot be opened.
    """
    with open_file(path) as file:
        yield from lines_of(file, longest)


def lines_of(
    file: BinaryIO, longest: int = LONGEST_LINE, number: int = 0
) -> Iterator[tuple[int, bytes]]:
    """`read_lines` of an open file, from where it stands, after ``number`` lines."""
    while data := file.readline(longest + 2):
        number += 1
        if len(data) > longest + 1:
            rest = data
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_BLOCK)
            data = data[: longest + 1] + (b"\n" if rest else b"")
        if not data.isspace():
            yield number, data


def parse_line(line: bytes | str, longest: int = LONGEST_LINE) -> Any:
    """Parse one line of JSON; NaN and infinities are refused.

    Raises:
        RecordFormatError: with the reason.
    """
    # One byte more is the newline.
    if len(line) > longest + 1 or (len(line) > longest and line[-1] not in (10, "\n")):
        raise RecordFormatError(f"longer than {longest} bytes")
    try:
        text = line if isinstance(line, str) else line.decode()
        return _DECODER.decode(text)
    except UnicodeDecodeError as exc:
        raise RecordFormatError(f"not UTF-8 text ({exc.reason} at byte {exc.start})") from exc
    except (ValueError, RecursionError) as exc:
        raise RecordFormatError(f"not valid JSON ({exc})") from exc


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def json_hash(value: Any) -> str:
    """16 hexadecimal digits of the SHA-256 of a JSON value, by which records name kernels."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def repair_tail(path: Path, longest: int = LONGEST_LINE) -> bool:
    """Cut a torn last line off a file of one JSON value a line. True when something was cut.

    Only the end of the file is read.

    Raises:
        WorkDirError: the file is a link out of its directory.
        RecordFormatError: the unfinished line is longer than any line of such a file.
    """
    refuse_link_out(path)
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = _last_line(file, size)
        if start == size:
            return False
        if size - start > longest:
            raise RecordFormatError(
                f"{path} ends with {size - start} bytes that are no line; it is not a log of ours"
            )
        file.seek(start)
        try:
            parse_line(file.read(), longest)
        except RecordFormatError:
            file.truncate(start)
            logger.warning("%s: the unfinished last line of an interrupted run was cut off", path)
            return True
        file.write(b"\n")
        return False


def _last_line(file: BinaryIO, size: int) -> int:
    """Where the unfinished last line begins; the size of the file when there is none."""
    end = size
    while end:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
