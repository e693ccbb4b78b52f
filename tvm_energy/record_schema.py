"""The JSON Schema of one line of a record file, for other readers: ``record.schema.json`` in this package.

Made from the rules by which `records.from_json` reads, so that the two cannot differ; after a change of
the records write it again with ``python -m tvm_energy.record_schema``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.records import KINDS, SCHEMA_VERSION, Header, Rule, rules_of

PATH = Path(__file__).with_name("record.schema.json")


def json_schema() -> dict[str, Any]:
    """Schema (draft 2020-12) of a line of the version that is written. Unknown fields are allowed."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"One line of database_energy_record.json, version {SCHEMA_VERSION}",
        "description": "Made by tvm_energy.record_schema; docs/formats.md explains the fields.",
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": list(KINDS)}},
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in KINDS],
        "$defs": {
            "measurement": _object(EnergyMeasurement),
            **{kind: _object(cls, kind) for kind, cls in KINDS.items()},
        },
    }


def _object(cls: type[Any], kind: str | None = None) -> dict[str, Any]:
    rules = rules_of(cls)
    properties = {rule.name: _field(rule) for rule in rules}
    required = [rule.name for rule in rules if rule.required]
    if kind is not None:
        properties = {"kind": {"const": kind}, **properties}
        required = ["kind", *required]
    if cls is Header:
        properties["schema"] = {"const": SCHEMA_VERSION}
        required.append("schema")
    return {"type": "object", "required": required, "properties": properties}


def _field(rule: Rule) -> dict[str, Any]:
    if rule.type == "measurement":
        inner: dict[str, Any] = {"$ref": "#/$defs/measurement"}
        return {"anyOf": [inner, {"type": "null"}]} if rule.nullable else inner
    name = "array" if rule.type == "names" else rule.type
    field: dict[str, Any] = {"type": [name, "null"] if rule.nullable else name}
    if rule.type == "names":
        field["items"] = {"type": "string"}
    elif rule.type in ("number", "integer"):
        field |= {"minimum": rule.low, "maximum": rule.high}
    return field


def text() -> str:
    """What the file holds."""
    return json.dumps(json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
