from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_examples import (
    at_clock,
    candidate,
    final,
    header,
    measurement,
    round_record,
    two_tasks,
    write_log,
)

from tvm_energy.errors import RecordFormatError, WorkDirError
from tvm_energy.json_lines import parse_line, repair_tail
from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.meters.base import MeterInfo
from tvm_energy.records import (
    FILE_NAME,
    SCHEMA_VERSION,
    CandidateRecord,
    Header,
    RecordLog,
    RoundRecord,
    TaskRecord,
    from_json,
    read_records,
    to_json,
)
from tvm_energy.replay import KernelSummary, TaskSummary, Totals, summarize
from tvm_energy.report import to_json as report_json

GOOD = [
    header(),
    header(meter=None),
    TaskRecord(task="conv", workload="w0", weight=2.5),
    candidate("a", 1e-3, 0.2, predicted_energy_j=0.21),
    candidate("b", None, error="build: no"),
    candidate("c", 2e-3, error="energy: the sensor did not move"),
    round_record(snr_db=-3.5),
    round_record(best_latency_s=None, best_cost=None),
    final("a", 1e-3, 0.2, 3, throttle_reasons=(), clock_mhz=None, temperature_c=-4.0),
    at_clock("a", 1005.0, 1.2e-3, 0.15, confirmed=True),
]


def as_line(record: Any) -> str:
    return json.dumps(to_json(record))


# -- reading what was written ----------------------------------------------------------------------


@pytest.mark.parametrize("record", GOOD, ids=lambda record: record.kind)
def test_a_record_survives_the_file(record: Any) -> None:
    assert from_json(parse_line(as_line(record))) == record


def test_a_log_is_read_in_order(tmp_path: Path) -> None:
    records = two_tasks()
    assert list(read_records(write_log(tmp_path, records))) == records


def test_appending_continues_a_log(tmp_path: Path) -> None:
    write_log(tmp_path, [header()])
    path = write_log(tmp_path, [header(objective="edp"), candidate("a", 1e-3)])
    assert [record.kind for record in read_records(path)] == ["header", "header", "candidate"]


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    values = to_json(candidate("a", 1e-3, 0.2)) | {"colour": "blue"}
    values["measured"]["mood"] = 3
    assert from_json(values) == candidate("a", 1e-3, 0.2)


def test_fields_with_defaults_may_be_missing() -> None:
    record = from_json(
        {"kind": "candidate", "workload": "w", "key": "k", "round": 0, "latency_s": 1e-3}
    )
    assert record == CandidateRecord(workload="w", key="k", round=0, latency_s=1e-3)


def test_flushed_records_are_on_disk_before_close(tmp_path: Path) -> None:
    log = RecordLog(tmp_path)
    log.append(header())
    log.flush()
    assert list(read_records(tmp_path / FILE_NAME)) == [header()]
    log.close()
    log.close()


# -- interrupted runs ------------------------------------------------------------------------------


def test_every_possible_torn_tail_is_left_out(tmp_path: Path) -> None:
    path = write_log(tmp_path, [header()])
    whole = path.read_text()
    line = as_line(candidate("a", 1e-3, 0.2))
    for length in range(1, len(line)):
        path.write_text(whole + line[:length])
        assert list(read_records(path)) == [header()], line[:length]


def test_a_last_line_that_lacks_only_its_newline_counts(tmp_path: Path) -> None:
    path = write_log(tmp_path, [header()])
    path.write_text(path.read_text() + as_line(candidate("a", 1e-3)))
    assert len(list(read_records(path))) == 2


def test_a_new_run_cuts_the_torn_tail_and_goes_on(tmp_path: Path) -> None:
    path = write_log(tmp_path, [header()])
    path.write_text(path.read_text() + '{"kind": "candi')
    write_log(tmp_path, [candidate("b", 1e-3)])
    assert [record.kind for record in read_records(path)] == ["header", "candidate"]


def test_repair_keeps_a_whole_line_and_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"a": 1}\n{"b": 2}')
    assert not repair_tail(path)
    assert path.read_text() == '{"a": 1}\n{"b": 2}\n'


@pytest.mark.parametrize("text", ["", "[1]\n"])
def test_repair_leaves_whole_files_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    assert not repair_tail(path)
    assert path.read_text() == text


def test_repair_of_a_file_with_nothing_but_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b'{"\xff')
    assert repair_tail(path)
    assert path.read_bytes() == b""
    assert not repair_tail(tmp_path / "missing.json")


def test_a_corrupt_line_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    path = write_log(tmp_path, two_tasks())
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:20]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordFormatError, match=r"database_energy_record\.json, line 5: not valid"):
        list(read_records(path))


def test_a_log_begins_with_a_header(tmp_path: Path) -> None:
    path = write_log(tmp_path, [candidate("a", 1e-3), header()])
    with pytest.raises(RecordFormatError, match="line 1: expected a header, got 'candidate'"):
        list(read_records(path))


def test_blank_lines_are_nothing(tmp_path: Path) -> None:
    path = write_log(tmp_path, [header()])
    path.write_text(path.read_text() + "\n  \n")
    assert list(read_records(path)) == [header()]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_refuses_a_log(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WorkDirError, match="choose another --work-dir"):
        RecordLog(tmp_path)


def test_a_missing_directory_refuses_a_log(tmp_path: Path) -> None:
    with pytest.raises(WorkDirError, match="cannot write"):
        RecordLog(tmp_path / "missing")


# -- lines that no run of ours writes --------------------------------------------------------------


@pytest.mark.parametrize("line", ["NaN", "[1, Infinity]", '{"a": -Infinity}', "{", "", "[" * 10**6])
def test_what_is_no_json_is_refused(line: str) -> None:
    with pytest.raises(RecordFormatError, match="not valid JSON"):
        parse_line(line)


@pytest.mark.parametrize("values", [None, 3, "header", [1, 2], [["kind", "header"]]])
def test_what_is_no_object_is_refused(values: Any) -> None:
    with pytest.raises(RecordFormatError, match="expected a JSON object"):
        from_json(values)


@pytest.mark.parametrize("kind", [None, "", "Header", 7, ["header"]])
def test_an_unknown_kind_lists_the_known_ones(kind: Any) -> None:
    with pytest.raises(RecordFormatError, match=r"unknown kind .* known are header, task, cand"):
        from_json({"kind": kind})


@pytest.mark.parametrize("schema", [0, -1, "1", None, True, 1.0, [1]])
def test_what_is_no_version_is_refused(schema: Any) -> None:
    with pytest.raises(RecordFormatError, match="schema must be a version number"):
        from_json(to_json(header()) | {"schema": schema})


@pytest.mark.parametrize("schema", [SCHEMA_VERSION + 1, 10**30])
def test_a_newer_version_is_refused_with_the_remedy(schema: int) -> None:
    with pytest.raises(RecordFormatError, match=r"newer than this tvm-energy.*update tvm-energy"):
        from_json(to_json(header()) | {"schema": schema})


CANDIDATE = to_json(candidate("a", 1e-3, 0.2, predicted_energy_j=0.2))
ROUND = to_json(round_record())
TASK = to_json(TaskRecord(task="t", workload="w"))


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (CANDIDATE, {"latency_s": 0}),
        (CANDIDATE, {"latency_s": -1e-3}),
        (CANDIDATE, {"latency_s": "1e-3"}),
        (CANDIDATE, {"latency_s": True}),
        (CANDIDATE, {"latency_s": math.inf}),
        (CANDIDATE, {"latency_s": 5e-324}),
        (CANDIDATE, {"key": None}),
        (CANDIDATE, {"key": ["a"]}),
        (CANDIDATE, {"workload": 7}),
        (CANDIDATE, {"round": -1}),
        (CANDIDATE, {"round": None}),
        (CANDIDATE, {"error": 7}),
        (CANDIDATE, {"predicted_energy_j": math.nan}),
        (CANDIDATE, {"predicted_energy_j": [1]}),
        (CANDIDATE, {"measured": []}),
        (CANDIDATE, {"measured": 3.0}),
        (CANDIDATE, {"measured": {}}),
        (ROUND, {"measured": None}),
        (ROUND, {"policy_state": None}),
        (ROUND, {"policy_state": [1]}),
        (ROUND, {"snr_db": "loud"}),
        (TASK, {"weight": -1}),
        (TASK, {"weight": 10**400}),
        (TASK, {"weight": None}),
    ],
    ids=lambda value: str(value)[:40] if len(value) == 1 else "",
)
def test_wrong_values_are_refused(base: dict[str, Any], change: dict[str, Any]) -> None:
    from_json(base)
    with pytest.raises(RecordFormatError):
        from_json(base | change)


@pytest.mark.parametrize(
    "change",
    [
        {"energy_j": 0},
        {"energy_j": -1.0},
        {"energy_j": None},
        {"energy_j": "0.2"},
        {"energy_j": 10**400},
        {"energy_j": 5e-324},
        {"stderr_j": -0.1},
        {"stderr_j": math.nan},
        {"latency_s": 0},
        {"launches": "many"},
        {"method": None},
        {"scope": 3},
        {"simulated": "no"},
        {"simulated": None},
        {"simulated": []},
        {"throttle_reasons": [["unhashable"]]},
        {"throttle_reasons": "abc"},
        {"throttle_reasons": 3},
        {"throttle_reasons": None},
        {"temperature_c": math.inf},
    ],
    ids=str,
)
def test_wrong_measurements_are_refused(change: dict[str, Any]) -> None:
    values = CANDIDATE | {"measured": CANDIDATE["measured"] | change}
    with pytest.raises(RecordFormatError):
        from_json(values)


@pytest.mark.parametrize("record", GOOD, ids=lambda record: record.kind)
def test_a_missing_field_is_named(record: Any) -> None:
    needed = [
        item.name
        for item in dataclasses.fields(record)
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    for name in needed:
        values = to_json(record)
        del values[name]
        with pytest.raises(RecordFormatError, match=name):
            from_json(values)


def test_nan_is_never_written(tmp_path: Path) -> None:
    with RecordLog(tmp_path) as log, pytest.raises(ValueError, match="JSON compliant"):
        log.append(
            RoundRecord(workload="w", round=0, candidates=1, gated=1, measured=0, snr_db=math.nan)
        )


# -- whatever a file may hold ----------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**300)
    | st.floats()
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(base=st.sampled_from([to_json(record) for record in GOOD]), data=st.data())
def test_any_value_in_any_field_is_read_or_refused(
    base: dict[str, Any], data: st.DataObject
) -> None:
    values = json.loads(json.dumps(base))
    place = values
    if isinstance(values.get("measured"), dict) and data.draw(st.booleans()):
        place = values["measured"]
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    try:
        record = from_json(values)
    except RecordFormatError:
        return
    hash(getattr(record, "measured", None))
    measured = getattr(record, "measured", None)
    if isinstance(measured, EnergyMeasurement):
        assert measured.energy_j > 0
        assert math.isfinite(measured.power_w)
        assert math.isfinite(measured.relative_stderr)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("log") / FILE_NAME
    path.write_bytes(as_line(header()).encode() + b"\n" + data + b"\n")
    try:
        records = list(read_records(path))
    except RecordFormatError as exc:
        message = str(exc)
    else:
        message = f"{path}, line 0" if records[0] == header() else "the header was lost"
    assert message.startswith(f"{path}, line ")


@given(
    energy_j=st.floats(min_value=1e-12, max_value=1e9),
    latency_s=st.floats(min_value=1e-12, max_value=1e9),
    stderr_j=st.floats(min_value=0, max_value=1e9),
)
def test_numbers_keep_every_bit(energy_j: float, latency_s: float, stderr_j: float) -> None:
    record = candidate("a", latency_s, energy_j, stderr_j=stderr_j)
    assert from_json(parse_line(as_line(record))) == record


def test_power_is_energy_over_time() -> None:
    assert measurement(0.2, 1e-3).power_w == pytest.approx(200)
    assert isinstance(from_json(to_json(header())), Header)


# -- the documentation -----------------------------------------------------------------------------


def documented_lines(repository: Path) -> list[str]:
    text = (repository / "docs" / "formats.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_documented_examples_are_a_log(repository: Path, tmp_path: Path) -> None:
    lines = documented_lines(repository)
    records = [from_json(parse_line(line)) for line in lines]
    assert {record.kind for record in records} == {record.kind for record in GOOD}
    for line, record in zip(lines, records, strict=True):
        assert to_json(record) == json.loads(line), "an example lacks a field or has one too many"
    (task,) = summarize(write_log(tmp_path, records)).tasks
    assert (task.candidates, task.failed, task.finalists) == (3, 1, 1)


def test_every_field_is_documented(repository: Path) -> None:
    text = (repository / "docs" / "formats.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z_]+)`", text))
    for cls in (*map(type, GOOD), EnergyMeasurement, TaskSummary, KernelSummary, Totals, MeterInfo):
        fields = {item.name for item in dataclasses.fields(cls)}
        assert fields <= documented, f"{cls.__name__}: {fields - documented}"
    assert set(report_json(summarize(two_tasks()))) <= documented
