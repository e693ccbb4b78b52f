"""PyTorch programs in ``.pt2`` files, read so that a file from a stranger executes nothing.

``torch.export.load`` must not be given such a file. In torch 2.14 the file decides that parts of it are
unpickled (sample inputs, weights, constants), that a compiled library is loaded, what is evaluated as
Python (sizes that depend on an input, names of values, guards) and which of torch's functions is called.

So a file is taken apart without torch, every part that will be used is compared with what is known
to be harmless, and these parts alone are written to a new file, which torch then reads. What is left:
raw tensors, and a graph of ``aten`` operators on tensors of fixed sizes. Everything else is refused.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvm_energy.errors import ConfigurationError, RecordFormatError
from tvm_energy.json_lines import open_file, parse_line
from tvm_energy.spelling import first_line

__all__ = ["read_pt2", "torch_module", "vetted_parts"]

_MODEL, _WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
_CONSTANTS, _SAMPLES = "data/constants/model_constants_config.json", "data/sample_inputs/model.pt"
_PAYLOAD = re.compile(r"data/(weights/weight|constants/tensor)_\d{1,9}")
#: Known and not needed: left out of the new file.
_UNUSED = re.compile(r"\.data/(version|serialization_id)|byteorder|\.format_version|"
                     r"\.storage_alignment|data/sample_inputs/model\.pt|extra/.*")  # fmt: skip
#: Largest graph that is read, in bytes; a network of a thousand operators has about four million.
_LARGEST_GRAPH = 2**28

#: ``from_file`` would open any file.
_OPERATOR = re.compile(r"torch\.ops\.aten\.(?!from_file\.)[a-z]\w*\.[A-Za-z]\w*", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w{0,200}", re.ASCII)
_DOTTED = re.compile(r"(\w{1,200}(\.\w{1,200})*)?", re.ASCII)
_TEXT = re.compile(r"[\w ,.>-]{0,200}", re.ASCII)
_NUMBER = re.compile(r"-?Infinity|NaN")
_DOTTED_KEYS = {"buffer_name", "fqn", "parameter_name", "path_name", "tensor_constant_name"}
#: Kinds of arguments that hold a number, a word, or tensors by name.
_ARGUMENTS = {
    "as_bool",
    "as_bools",
    "as_device",
    "as_float",
    "as_floats",
    "as_int",
    "as_int_lists",
    "as_ints",
    "as_layout",
    "as_memory_format",
    "as_nested_tensors",
    "as_none",
    "as_optional_tensor",
    "as_optional_tensors",
    "as_scalar_type",
    "as_string",
    "as_strings",
    "as_tensor",
    "as_tensors",
}
#: Further keys of torch's schema (version 8) whose values are harmless.
_KEYS = _ARGUMENTS | _DOTTED_KEYS | {
    "arg",
    "buffer",
    "buffer_mutation",
    "config",
    "constant_input",
    "device",
    "dtype",
    "forward_arg_names",
    "graph",
    "graph_module",
    "index",
    "input_specs",
    "inputs",
    "is_hop_single_tensor_return",
    "is_param",
    "is_single_tensor_return",
    "kind",
    "layout",
    "loss_output",
    "major",
    "minor",
    "module_call_graph",
    "name",
    "nodes",
    "opset_version",
    "output_specs",
    "outputs",
    "parameter",
    "persistent",
    "requires_grad",
    "schema_version",
    "signature",
    "sizes",
    "storage_offset",
    "strides",
    "tensor_constant",
    "tensor_meta",
    "tensor_values",
    "type",
    "use_pickle",
    "user_input",
    "user_output",
    "value",
    "verifiers",
}  # fmt: skip
#: Keys whose values are maps from names of the file's own.
_MAPS = {"config", "opset_version", "tensor_values"}
#: Left out: nothing that is needed, and torch evaluates the guards.
_DROPPED = {"metadata": {}, "torch_version": "", "guards_code": []}
#: What these hold would be evaluated or looked up; a file without them has them empty.
_MUST_BE_EMPTY = {
    "custom_obj_values": "custom objects",
    "range_constraints": "sizes that depend on an input",
    "sym_bool_values": "sizes that depend on an input",
    "sym_float_values": "sizes that depend on an input",
    "sym_int_values": "sizes that depend on an input",
    "treespec_namedtuple_fields": "named tuples",
}
_TREES = {"builtins.dict", "builtins.list", "builtins.tuple", None}


class _Refused(Exception):
    """Why a file is not read."""


def torch_module() -> Any:
    """The module ``torch``.

    Raises:
        ConfigurationError: it is not installed, or cannot be imported.
    """
    try:
        import torch
        import torch.export
    except (ImportError, OSError) as exc:
        raise ConfigurationError(f"PyTorch networks need torch ({exc}); pip install torch") from exc
    return torch


def read_pt2(path: Path | str) -> Any:
    """The ``torch.export.ExportedProgram`` of a file that ``torch.export.save`` wrote.

    Raises:
        ConfigurationError: no such file, not of this kind, or holding what is refused; see above.
    """
    torch = torch_module()
    with tempfile.NamedTemporaryFile(suffix=".pt2") as clean:
        writer = torch._C.PyTorchFileWriter(clean.name)
        writer.set_min_version(6)
        for name, data in vetted_parts(path).items():
            writer.write_record(name, data, len(data))
        writer.write_end_of_file()
        try:
            return torch.export.load(clean.name)
        except Exception as exc:
            raise ConfigurationError(
                f"torch {torch.__version__} cannot read {str(path)!r}: {first_line(exc)}; "
                "export it with this version of torch"
            ) from exc


def vetted_parts(path: Path | str) -> dict[str, bytes]:
    """The parts of a ``.pt2`` file that are needed and harmless, by name. Needs no torch.

    Raises:
        ConfigurationError: as `read_pt2`.
    """
    try:
        with open_file(Path(path)) as file, zipfile.ZipFile(file) as archive:
            if sum(item.file_size for item in archive.infolist()) > Path(path).stat().st_size:
                raise _Refused("its parts are larger than the file itself")
            return _vetted(archive)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{str(path)!r} does not exist; give the path of a .pt2 file"
        ) from None
    except OSError as exc:
        raise ConfigurationError(f"{str(path)!r} cannot be read: {exc.strerror}") from exc
    except (_Refused, RecordFormatError) as exc:
        raise ConfigurationError(
            f"{str(path)!r} is refused: {exc}. If you trust it, load it in a Python function of "
            "yours and name that: torch:MODULE:FUNCTION"
        ) from exc
    except (zipfile.BadZipFile, EOFError, ArithmeticError, LookupError, RuntimeError) as exc:
        raise ConfigurationError(
            f"{str(path)!r} is not a file of torch.export.save: {str(exc)[:200]}"
        ) from exc
    except (AttributeError, TypeError, ValueError) as exc:
        raise ConfigurationError(
            f"{str(path)!r} is not a file of torch.export.save: its parts are malformed"
        ) from exc


def _vetted(archive: zipfile.ZipFile) -> dict[str, bytes]:
    members: dict[str, zipfile.ZipInfo] = {}
    for item in archive.infolist():
        name = item.filename.partition("/")[2]
        if name in members:
            raise _Refused(f"it holds {name[:80]!r} twice")
        if item.compress_type != zipfile.ZIP_STORED:
            # Stored parts cannot unfold into more than the file itself holds.
            raise _Refused(f"{name[:80]!r} is compressed, which torch does not write")
        members[name] = item
    for needed in (_MODEL, _WEIGHTS, _CONSTANTS):
        if needed not in members:
            raise _Refused(f"it has no {needed!r}; export it with torch 2.9 or newer")
    if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
        raise _Refused("it was written on a big-endian machine")
    configs = {}
    for name in (_MODEL, _WEIGHTS, _CONSTANTS):
        if members[name].file_size > _LARGEST_GRAPH:
            raise _Refused(f"{name!r} is too large")
        text = archive.read(members[name]).decode("utf-8", errors="strict")
        configs[name] = _checked(parse_line(text, _LARGEST_GRAPH), "")
    for name in (_WEIGHTS, _CONSTANTS):
        _check_payloads(configs[name], name.rpartition("/")[0], members)
    parts = {name: json.dumps(value).encode() for name, value in configs.items()}
    # torch reads an empty part as: there are no sample inputs.
    parts |= {_SAMPLES: b"", "archive_format": b"pt2", "archive_version": b"0"}
    for name, item in members.items():
        if _PAYLOAD.fullmatch(name):
            parts[name] = archive.read(item)
        elif name not in parts and not _UNUSED.fullmatch(name):
            raise _Refused(f"it holds {name[:80]!r}, which might be executed")
    return parts


def _checked(value: Any, key: str) -> Any:
    """The value without what is dropped; ``key`` is the nearest key above it."""
    if isinstance(value, dict):
        return {name: _item(name, item, named_by_file=key in _MAPS) for name, item in value.items()}
    if isinstance(value, list):
        return [_checked(item, key) for item in value]
    if isinstance(value, str):
        _check_text(value, key)
    return value


def _item(name: str, value: Any, *, named_by_file: bool) -> Any:
    if named_by_file:
        _check_text(name, "fqn")
        return _checked(value, "")
    if name in _DROPPED:
        return _DROPPED[name]
    if name in _MUST_BE_EMPTY:
        if value not in ({}, None):
            raise _Refused(f"it has {_MUST_BE_EMPTY[name]}")
        return value
    if name in ("device", "as_device"):
        return {"type": "cpu", "index": None}  # exported on a GPU, but only looked at here
    if name == "target":
        if not (isinstance(value, str) and _OPERATOR.fullmatch(value)):
            raise _Refused(f"it calls {str(value)[:80]!r}, which is no operator of aten")
        return value
    if name in ("in_spec", "out_spec"):
        _check_tree(value)
        return value
    if name not in _KEYS:
        raise _Refused(f"it has {name[:80]!r}, which is not known to be harmless")
    return _checked(value, name)


def _check_text(text: str, key: str) -> None:
    """Names of values become Python source in torch, so they must be names indeed."""
    patterns = {"as_string": _TEXT, "as_strings": _TEXT, "as_float": _NUMBER, "as_floats": _NUMBER}
    pattern = _DOTTED if key in _DOTTED_KEYS else patterns.get(key, _IDENTIFIER)
    if not pattern.fullmatch(text):
        raise _Refused(f"{text[:80]!r} is no name")


def _check_tree(text: Any) -> None:
    """How inputs and outputs are nested: tuples, lists and dictionaries alone."""
    if not isinstance(text, str):
        raise _Refused("it does not say how inputs and outputs are nested")
    version, *trees = parse_line(text)
    if version != 1:
        raise _Refused(f"it nests inputs in version {str(version)[:20]} of torch's way, not in 1")
    while trees:
        tree = trees.pop()
        if not isinstance(tree, dict) or tree.keys() != {"type", "context", "children_spec"}:
            raise _Refused("it does not say how inputs and outputs are nested")
        if tree["type"] not in _TREES:
            raise _Refused(f"it has inputs or outputs of type {str(tree['type'])[:80]!r}")
        if tree["context"] is not None:
            for name in parse_line(tree["context"]) or ():
                _check_text(str(name), "name")
        trees.extend(tree["children_spec"])


def _check_payloads(
    config: Mapping[str, Any], folder: str, members: Mapping[str, zipfile.ZipInfo]
) -> None:
    """Every tensor is raw and no larger than its part."""
    for name, entry in config["config"].items():
        part = f"{folder}/{entry['path_name']}"
        if entry["use_pickle"] is not False or not _PAYLOAD.fullmatch(part):
            raise _Refused(f"{name[:80]!r} is pickled, and unpickling may execute anything")
        if part not in members:
            raise _Refused(f"it lacks {part!r}")
        sizes = [item["as_int"] for item in entry["tensor_meta"]["sizes"]]
        if any(type(size) is not int or size < 0 for size in sizes):
            raise _Refused(f"the sizes of {name[:80]!r} are {str(sizes)[:80]}")
        if math.prod(sizes) > members[part].file_size:
            raise _Refused(f"{name[:80]!r} is larger than its part of the file")
