"""PyTorch networks, with the real torch; where there is none, only what is refused without it.

With torch (a CPU is enough) the whole file takes two to three minutes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tvm_energy.cli import app
from tvm_energy.errors import ConfigurationError
from tvm_energy.meta_schedule.models import check_model, load_function, open_model
from tvm_energy.meta_schedule.pt2 import vetted_parts

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch, which CI does not install"
)

#: What torch 2.14 wrote for ``torch.nn.Linear(2, 3)``, its tensors and sample inputs left out.
LINEAR = Path(__file__).with_name("linear_pt2.json")


def linear_parts() -> dict[str, bytes]:
    texts: dict[str, Any] = json.loads(LINEAR.read_text())
    parts = {name: json.dumps(value).encode() for name, value in texts.items()}
    tensors = np.arange(9, dtype=np.float32)
    return parts | {
        "data/weights/weight_0": tensors[:6].tobytes(),
        "data/weights/weight_1": tensors[6:].tobytes(),
        "data/sample_inputs/model.pt": pickle.dumps("never read"),
        "archive_format": b"pt2",
        "archive_version": b"0",
        ".data/version": b"6\n",
        "byteorder": b"little",
    }


def written(folder: Path, parts: dict[str, bytes], name: str = "linear.pt2") -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for part, data in parts.items():
            archive.writestr(f"linear/{part}", data)
    return path


def graph_of(parts: dict[str, bytes]) -> Any:
    return json.loads(parts["models/model.json"])


MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


def test_a_harmless_file_is_taken_apart(tmp_path: Path) -> None:
    parts = vetted_parts(written(tmp_path, linear_parts()))
    assert sorted(parts) == sorted(
        [
            MODEL,
            WEIGHTS,
            CONSTANTS,
            "archive_format",
            "archive_version",
            "data/sample_inputs/model.pt",
            "data/weights/weight_0",
            "data/weights/weight_1",
        ]
    )
    # What torch would unpickle, evaluate, or does not need is gone.
    assert parts["data/sample_inputs/model.pt"] == b""
    graph = graph_of(parts)
    assert graph["guards_code"] == []
    assert all(node["metadata"] == {} for node in graph["graph_module"]["graph"]["nodes"])


def in_node(key: str, value: Any) -> Any:
    def change(graph: Any) -> None:
        graph["graph_module"]["graph"]["nodes"][0][key] = value

    return change


def in_graph(key: str, value: Any) -> Any:
    def change(graph: Any) -> None:
        graph["graph_module"]["graph"][key] = value

    return change


def in_first_argument(value: Any) -> Any:
    def change(graph: Any) -> None:
        graph["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"] = value

    return change


def in_tree(tree: Any) -> Any:
    def change(graph: Any) -> None:
        entry = graph["graph_module"]["module_call_graph"][0]
        entry["signature"]["in_spec"] = json.dumps([1, tree])

    return change


def open_size(graph: Any) -> None:
    meta = graph["graph_module"]["graph"]["tensor_values"]["x"]
    meta["sizes"][0] = {"as_expr": {"expr_str": "__import__('os').system('true')", "hint": None}}


EVIL = {
    "a function of another module": in_node("target", "torch.os.system"),
    "operator module": in_node("target", "_operator.methodcaller"),
    "a way through an operator": in_node("target", "torch.ops.aten.__class__.__init__"),
    "opens files": in_node("target", "torch.ops.aten.from_file.default"),
    "an operator from elsewhere": in_node("target", "#evil:operator"),
    "Python in a name": in_node("name", "x = __import__('os').system('true')"),
    "Python in an argument's name": in_first_argument({"as_tensor": {"name": "x); import os; ("}}),
    "text": in_first_argument({"as_string": "'); import os #"}),
    "a graph in a graph": in_first_argument({"as_graph": {"name": "g", "graph": {}}}),
    "an operator as argument": in_first_argument({"as_operator": "torch.os.system"}),
    "an object": in_first_argument({"as_custom_obj": {"name": "o", "class_fqn": "os.system"}}),
    "a size that is evaluated": open_size,
    "sizes": in_graph("sym_int_values", {"s0": {"as_expr": {"expr_str": "1"}}}),
    "objects": in_graph("custom_obj_values", {"o": {"name": "o", "class_fqn": "a"}}),
    "a field of tomorrow": in_graph("hooks", ["import os"]),
    "a type that imports": in_tree(
        {
            "type": "collections.defaultdict",
            "context": '{"default_factory_module": "os", "default_factory_name": "getcwd"}',
            "children_spec": [],
        }
    ),
}


@pytest.mark.parametrize("name", EVIL)
def test_graphs_that_could_execute_something_are_refused(tmp_path: Path, name: str) -> None:
    parts = linear_parts()
    graph = graph_of(parts)
    EVIL[name](graph)
    parts[MODEL] = json.dumps(graph).encode()
    with pytest.raises(ConfigurationError, match=r"is refused: .*torch:MODULE:FUNCTION"):
        vetted_parts(written(tmp_path, parts))


def test_guards_are_not_kept(tmp_path: Path) -> None:
    parts = linear_parts()
    graph = graph_of(parts) | {"guards_code": ["__import__('os').system('true')"]}
    parts[MODEL] = json.dumps(graph).encode()
    assert graph_of(vetted_parts(written(tmp_path, parts)))["guards_code"] == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_pickle": True}, "is pickled"),
        ({"path_name": "../constants/opaque_obj_0"}, "is no name"),
        ({"path_name": "opaque_obj_0"}, "is pickled"),
        ({"path_name": "weight_7"}, "it lacks 'data/weights/weight_7'"),
    ],
)
def test_weights_that_are_not_raw_are_refused(tmp_path: Path, change: Any, reason: str) -> None:
    parts = linear_parts()
    config = json.loads(parts[WEIGHTS])
    config["config"]["weight"].update(change)
    parts[WEIGHTS] = json.dumps(config).encode()
    with pytest.raises(ConfigurationError, match=reason):
        vetted_parts(written(tmp_path, parts))


@pytest.mark.parametrize(
    "name",
    ["data/weights/model.pt", "data/constants/model.pt", "data/aotinductor/model/a.so", "other"],
)
def test_further_parts_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="might be executed"):
        vetted_parts(written(tmp_path, linear_parts() | {name: b"x"}))


def test_archives_that_could_be_read_in_two_ways_or_unfold_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, linear_parts())
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(f"linear/{MODEL}", b"{}")
    with pytest.raises(ConfigurationError, match="twice"):
        vetted_parts(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"linear/{MODEL}", bytes(1 << 20))
    with pytest.raises(ConfigurationError, match="larger than the file"):
        vetted_parts(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_hostile_files_raise_one_kind_of_error(data: Any) -> None:
    """Any value in any place of the graph, or any bytes at all."""
    parts = linear_parts()
    name = data.draw(st.sampled_from([MODEL, WEIGHTS, CONSTANTS]))
    value = json.loads(parts[name])
    at: Any = value
    while isinstance(at, (dict, list)) and at:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if data.draw(st.booleans()) or not isinstance(at[key], (dict, list)):
            at[key] = data.draw(
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
                    lambda inner: (
                        st.lists(inner, max_size=3)
                        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
                    ),
                    max_leaves=5,
                )
            )
            break
        at = at[key]
    parts[name] = json.dumps(value).encode()
    if data.draw(st.integers(0, 9)) == 0:
        parts[name] = data.draw(st.binary(max_size=40))
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ConfigurationError):
        vetted_parts(written(Path(folder), parts))


@pytest.mark.parametrize("data", [b"", b"PK\x05\x06", b"\x80\x02}q\x00.", b"PK" * 5000])
def test_files_of_another_kind_are_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(data)
    with pytest.raises(ConfigurationError, match=r"is not a file of torch.export.save|is refused"):
        vetted_parts(path)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("missing.pt2", "does not exist"),
        ("torch:nothing", "not of the form torch:MODULE:FUNCTION"),
        ("torch:os;x:f", "not of the form torch:MODULE:FUNCTION"),
    ],
)
def test_names_that_cannot_be(model: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        check_model(model)


def test_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(pickle.dumps({}))
    done = CliRunner().invoke(app, ["tune", str(path), "--device", "sim:a100"])
    assert done.exit_code == 2
    assert "is a pickle, which may execute anything" in done.stderr


def test_without_torch_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ConfigurationError, match=r"need torch .*pip install torch"):
        open_model(str(written(tmp_path, linear_parts())))


# ---- with torch -------------------------------------------------------------------------------

NETWORKS = """
import torch


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.out = torch.nn.Linear(8, 10)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.shift = torch.linspace(-1, 1, 8)

    def forward(self, image, factor):
        a, b = torch.relu(self.norm(self.conv(image))).mean((2, 3)).split(4, 1)
        x = torch.cat([b, a], 1) * self.scale + self.shift
        return {"probabilities": torch.softmax(self.out(x) * factor, -1), "hidden": x}


def small():
    return Small(), (torch.randn(1, 3, 16, 16), torch.randn(1, 1))


def encoder():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return layer, (torch.randn(2, 8, 32),)


def module():
    return torch.nn.Linear(4, 3)


def exported():
    return torch.export.export(torch.nn.Linear(4, 3), (torch.randn(2, 4),))


def open_sizes():
    sizes = ({0: torch.export.Dim("batch")},)
    return torch.export.export(torch.nn.Linear(4, 3), (torch.randn(2, 4),), dynamic_shapes=sizes)


def number():
    return 7


def broken():
    raise ValueError("no weights here")
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("networks")
    (folder / "energy_test_networks.py").write_text(NETWORKS)
    return folder


def in_module(function: str) -> str:
    return f"torch:energy_test_networks:{function}"


def saved(function: str, folder: Path) -> Path:
    import torch

    path = folder / f"{function}.pt2"
    torch.export.save(load_function(in_module(function), {}), path)
    return path


def agrees(model: Any) -> None:
    from tvm.target import Target

    from tvm_energy.meta_schedule.compiling import compare_outputs
    from tvm_energy.meta_schedule.networks import compile_network

    compiled = compile_network(model.network, Target("llvm"))
    inputs = model.network.random_inputs(seed=1)
    verdict = compare_outputs(compiled.run(inputs), model.reference(inputs), model.reference_name)
    assert verdict.ok
    assert not verdict.constant
    assert verdict.reference == "torch"
    other = model.network.random_inputs(seed=2)
    assert not compare_outputs(compiled.run(other), model.reference(inputs), "torch").ok


@needs_torch
@pytest.mark.parametrize("function", ["small", "encoder"])
def test_a_file_computes_what_torch_does(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.chdir(here)
    model = open_model(str(saved(function, tmp_path)))
    assert model.network.name == function
    agrees(model)


@needs_torch
def test_functions(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    agrees(open_model(in_module("exported")))
    agrees(open_model(in_module("module"), {"input": (5, 4)}))
    small = open_model(in_module("small")).network
    assert list(small.inputs) == ["image", "factor"]
    assert len(small.outputs) == 2


@needs_torch
@pytest.mark.parametrize(
    ("function", "shapes", "reason"),
    [
        ("number", {}, "returned int; it must return"),
        ("broken", {}, "failed: ValueError: no weights here"),
        ("absent", {}, "has no function 'absent'"),
        ("module", {}, "without example inputs; .*--input-shape"),
        ("small", {"image": (1, 3, 8, 8)}, "brings its inputs"),
        ("exported", {"input": (1, 4)}, "exported already"),
        ("module", {"input": (5, 9)}, "torch cannot export"),
        ("open_sizes", {}, "leaves the shape of input 'input' open"),
    ],
)
def test_functions_that_cannot_be_used(
    here: Path, monkeypatch: pytest.MonkeyPatch, function: str, shapes: Any, reason: str
) -> None:
    monkeypatch.chdir(here)
    with pytest.raises(ConfigurationError, match=reason):
        open_model(in_module(function), shapes)


@needs_torch
def test_what_torch_would_execute_is_not_executed(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle in the place of the sample inputs: torch itself runs it, we do not."""
    import torch

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.write_text, (tmp_path / "executed", "")

    monkeypatch.chdir(here)
    source = saved("exported", tmp_path)
    evil = io.BytesIO()
    torch.save((Evil(),), evil)
    with zipfile.ZipFile(source) as archive:
        parts = {i.filename.partition("/")[2]: archive.read(i) for i in archive.infolist()}
    parts["data/sample_inputs/model.pt"] = evil.getvalue()
    path = written(tmp_path, parts, "evil.pt2")
    open_model(str(path))
    assert not (tmp_path / "executed").exists()
    # pytest makes an error of torch's malformed warning.
    with contextlib.suppress(Exception):
        torch.export.load(path)
    assert (tmp_path / "executed").exists(), (
        "torch no longer unpickles: this module may be simplified"
    )


@needs_torch
@pytest.mark.tuning
def test_tune_and_compile_a_file(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    path, out = saved("small", tmp_path), tmp_path / "out"
    tune = ["tune", str(path), "--device", "cpu", "--objective", "latency", "--trials", "4"]
    tune += ["--population", "16", "--max-tasks", "1", "--work-dir", str(out), "--quiet"]
    done = CliRunner().invoke(app, tune)
    assert done.exit_code == 0, done.output
    library = tmp_path / "model.so"
    compile_it = ["compile", str(path), "--log", str(out), "-o", str(library), "--verify", "--json"]
    done = CliRunner().invoke(app, compile_it)
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["verdict"]["ok"] is True
    assert values["verdict"]["reference"] == "torch"
    assert sum(kernel["origin"] == "log" for kernel in values["kernels"]) == 1
