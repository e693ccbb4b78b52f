"""The JSON Schema in the package, the golden files of each version, and the documentation agree."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_examples import at_clock, candidate, final, header, round_record

from tvm_energy.errors import ConfigurationError, RecordFormatError
from tvm_energy.json_lines import parse_line, read_lines
from tvm_energy.policy_replay import replay_policy
from tvm_energy.record_schema import PATH, json_schema, text
from tvm_energy.records import (
    SCHEMA_VERSION,
    CandidateRecord,
    ClockRecord,
    Header,
    RoundRecord,
    TaskRecord,
    from_json,
    read_records,
    to_json,
)
from tvm_energy.replay import summarize

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = range(1, SCHEMA_VERSION + 1)
RECORDS = [
    header(),
    header(meter=None),
    TaskRecord(task="conv", workload="w0", weight=2.5),
    candidate("a", 1e-3, 0.2, predicted_energy_j=0.21),
    candidate("b", None, error="build: no"),
    round_record(snr_db=-3.5, chosen=("a", "b")),
    final("a", 1e-3, 0.2, 3, clock_mhz=None, temperature_c=-4.0),
    at_clock("a", 1005.0, 1.2e-3, 0.15, confirmed=True),
]


def golden(version: int) -> Path:
    return GOLDEN / f"records_v{version}.json"


@functools.cache
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema())


def test_the_file_in_the_package_is_up_to_date() -> None:
    assert PATH.read_text("utf-8") == text(), "run: python -m tvm_energy.record_schema"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_what_we_write_fits_the_schema(record: Any) -> None:
    validator().validate(json.loads(json.dumps(to_json(record))))


def test_a_golden_log_of_this_version_fits_the_schema() -> None:
    check = validator()
    for _, line in read_lines(golden(SCHEMA_VERSION)):
        check.validate(json.loads(line))


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.integers(min_value=2**63),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.text(alphabet="ab", max_size=3),
    st.lists(st.just("a") | st.integers(), max_size=2),
    st.dictionaries(st.just("a"), st.integers(0, 9), max_size=1),
)


@settings(deadline=None)
@given(record=st.sampled_from(RECORDS), data=st.data())
def test_reader_and_schema_refuse_the_same(record: Any, data: st.DataObject) -> None:
    """Apart from what a schema cannot say, none of which is drawn here."""
    values = json.loads(json.dumps(to_json(record)))
    place = values
    if isinstance(values.get("measured"), dict) and data.draw(st.booleans()):
        place = values["measured"]
    name = data.draw(st.sampled_from(sorted(place)))
    odd = data.draw(ODD)
    place[name] = odd
    if isinstance(odd, float) and odd.is_integer():
        return  # 3.0 is an integer for JSON Schema; we never write one
    if name == "schema" and type(odd) is int and 1 <= odd < SCHEMA_VERSION:
        return  # older versions are read; the schema is that of what is written
    try:
        from_json(values)
        read = True
    except RecordFormatError:
        read = False
    assert read == validator().is_valid(values)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_read(version: int) -> None:
    path = golden(version)
    first = parse_line(next(read_lines(path))[1])
    assert first["schema"] == version
    records = list(read_records(path))
    assert [type(record) for record in records[:2]] == [Header, TaskRecord]
    assert sum(isinstance(record, CandidateRecord) for record in records) == 32
    # What was read is of the version that is written now.
    assert from_json(json.loads(json.dumps(to_json(records[0])))) == records[0]
    assert all(
        to_json(record).get("schema", SCHEMA_VERSION) == SCHEMA_VERSION for record in records
    )
    (task,) = summarize(path).tasks
    assert task.best is not None
    assert task.best.measured
    assert task.finalists == 4


def test_what_each_version_has_of_choices_and_clocks() -> None:
    for version, known in ((1, False), (2, True), (3, True)):
        records = list(read_records(golden(version)))
        rounds = [record for record in records if isinstance(record, RoundRecord)]
        assert len(rounds) == 4
        assert all((record.chosen is not None) == known for record in rounds)
        points = [record for record in records if isinstance(record, ClockRecord)]
        assert bool(points) == (version >= 3)
        assert isinstance(records[0], Header)
        assert records[0].clocks == (
            {"finalists": 3, "per_kernel": False} if version >= 3 else None
        )


def test_kernel_and_clock_of_a_golden_log_are_chosen_again() -> None:
    summary = summarize(golden(3))
    assert (summary.clock_choice, summary.clock_mhz) == ("one", 1320.0)
    (task,) = summary.tasks
    assert task.best is not None
    assert task.fastest is not None
    assert task.best.latency_s <= 1.05 * task.fastest.latency_s
    assert task.clock_saved_fraction == pytest.approx(0.0508, abs=1e-3)
    assert summarize(golden(3), clock_choice="default").clock_mhz is None
    with pytest.raises(ConfigurationError, match="--clocks"):
        summarize(golden(2), clock_choice="one")


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_decisions_are_reproduced(version: int) -> None:
    replay = replay_policy(golden(version))
    assert replay.differences == 0
    assert len(replay.steps) == 4
    assert replay.choices_checked == (4 if version >= 2 else 0)


def test_a_run_continues_a_log_of_an_older_version(tmp_path: Path) -> None:
    """Each run is read by the version in its header."""
    path = tmp_path / "database_energy_record.json"
    path.write_bytes(golden(1).read_bytes() + golden(2).read_bytes())
    records = list(read_records(path))
    rounds = [record for record in records if isinstance(record, RoundRecord)]
    assert [record.chosen is None for record in rounds] == [True] * 4 + [False] * 4
