#!/usr/bin/env python3
"""Coverage-guided fuzzing of everything that reads files from strangers, with atheris.

    pip install atheris
    scripts/fuzz_records.py --seconds 300

The first byte of an input chooses the reader; the rest is the file, or is put into a good log. Whatever the
bytes are, a reader may only return or raise an error of `tvm_energy.errors`: any other exception, a hang or too
much memory ends the run with the input kept.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tvm_energy"]):
    from tvm_energy.errors import TvmEnergyError
    from tvm_energy.json_lines import repair_tail
    from tvm_energy.logs.convert import convert
    from tvm_energy.logs.load import Log
    from tvm_energy.logs.merge import merge
    from tvm_energy.logs.prune import prune
    from tvm_energy.logs.stat import stat, to_json
    from tvm_energy.logs.verify import Counts, verify
    from tvm_energy.policy_replay import replay_policy
    from tvm_energy.records import FILE_NAME
    from tvm_energy.replay import summarize
    from tvm_energy.work_dir import TUNING_RECORD_FILE, WORKLOAD_FILE

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"


class Target:
    """Runs one reader on one input, in a folder in memory where there is one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._good = (GOLDEN / "records_v2.json").read_bytes().splitlines(keepends=True)[:6]
        self.runs = self.refused = 0

    def __call__(self, data: bytes) -> None:
        if not data:
            return
        self.runs += 1
        choice, data = data[0], data[1:]
        work_dir, out = self._folder / "in", self._folder / "out"
        work_dir.mkdir(exist_ok=True)
        record_file = work_dir / FILE_NAME
        content = data
        if choice & 64:  # as one more line, or as a damaged beginning
            content = b"".join(self._good) + data + b"\n" + self._good[2]
        record_file.write_bytes(content)
        for name in (WORKLOAD_FILE, TUNING_RECORD_FILE):
            (work_dir / name).write_bytes(data if choice & 128 else b"")
        actions = (
            lambda: summarize(work_dir, "edp"),
            lambda: list(verify(work_dir, Counts())),
            lambda: to_json(stat(Log.of(work_dir))),
            lambda: replay_policy(work_dir),
            lambda: replay_policy(work_dir, "fixed:0.5", "energy"),
            lambda: prune(work_dir, out),
            lambda: merge([work_dir, GOLDEN / "records_v2.json"], out),
            lambda: self._table(data, ".csv"),
            lambda: self._table(data, ".json"),
            lambda: convert(work_dir, out / "log.csv"),
            lambda: repair_tail(record_file),
        )
        try:
            actions[choice % 64 % len(actions)]()
        except TvmEnergyError:
            self.refused += 1
        finally:
            for path in out.glob("*") if out.exists() else ():
                path.unlink()

    def _table(self, data: bytes, suffix: str) -> None:
        path = self._folder / f"table{suffix}"
        path.write_bytes(data)
        convert(path, self._folder / "out")


def corpus(folder: Path) -> None:
    """Good files to start from."""
    for version in (1, 2):
        text = (GOLDEN / f"records_v{version}.json").read_bytes()
        lines = text.splitlines(keepends=True)
        for index in {0, 1, 2, len(lines) // 2, len(lines) - 5, len(lines) - 1}:
            (folder / f"line{version}-{index}").write_bytes(bytes([64]) + lines[index])
        (folder / f"log{version}").write_bytes(bytes([3]) + text)
    with tempfile.TemporaryDirectory() as name:
        for number, suffix in ((7, ".csv"), (8, ".json")):
            path = Path(name) / f"log{suffix}"
            convert(GOLDEN / "records_v2.json", path)
            (folder / f"table{suffix}").write_bytes(bytes([number]) + path.read_bytes())
    stock = b'["1", "module"]\n[0, [[[["Split", [], [1], []]], []], [1.0], {}, []]]\n'
    (folder / "stock").write_bytes(bytes([128 + 5]) + stock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="folder of inputs, kept and extended")
    options = parser.parse_args()
    logging.getLogger("tvm_energy").setLevel(logging.CRITICAL)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        inputs = options.corpus or Path(name) / "corpus"
        inputs.mkdir(parents=True, exist_ok=True)
        corpus(inputs)
        (Path(name) / "work").mkdir()
        target = Target(Path(name) / "work")
        atheris.Setup(
            [
                sys.argv[0],
                str(inputs),
                f"-max_total_time={options.seconds}",
                "-timeout=20",
                "-rss_limit_mb=2048",
                "-max_len=8192",
                "-print_final_stats=1",
            ],
            target,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
