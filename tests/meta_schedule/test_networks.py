"""ONNX networks: reading, what becomes a task, and that compiled networks compute the same.

ONNX Runtime is the judge. The reference outputs that come with the model-zoo files are not used:
their weights are constants, so every output is the same number and proves nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_energy.errors import ConfigurationError
from tvm_energy.meta_schedule.networks import (
    ONNX_MODEL_ZOO,
    CompiledNetwork,
    InputSpec,
    Network,
    compile_network,
    extract_tasks,
    import_onnx,
    load_onnx,
    lower,
    onnx_model_zoo_path,
    read_onnx,
    with_random_weights,
)

IMAGE = [1, 3, 16, 16]


def small_model(shape: list[Any] = IMAGE, seed: int = 0) -> onnx.ModelProto:
    """Conv, ReLU, max pool, Gemm, softmax, with random weights; its first graph input is a weight."""
    rng = np.random.default_rng(seed)

    def weight(name: str, *sizes: int) -> onnx.TensorProto:
        values = rng.standard_normal(sizes) * np.sqrt(2 / max(np.prod(sizes[1:]), 1))
        return numpy_helper.from_array(values.astype(np.float32), name)

    weights = [
        weight("conv.w", 8, 3, 3, 3),
        weight("conv.b", 8),
        weight("fc.w", 10, 8 * 8 * 8),
        weight("fc.b", 10),
    ]
    nodes = [
        helper.make_node("Conv", ["image", "conv.w", "conv.b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "fc.w", "fc.b"], ["g"], transB=1),
        helper.make_node("Softmax", ["g"], ["probabilities"]),
    ]
    first = helper.make_tensor_value_info("conv.w", TensorProto.FLOAT, [8, 3, 3, 3])
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, shape)
    output = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [1, 10])
    graph = helper.make_graph(nodes, "small", [first, image], [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def run_onnxruntime(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)


def target(description: str | dict[str, Any]) -> Any:
    from tvm.target import Target

    return Target(description)


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "small.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def small() -> Network:
    return import_onnx(small_model(), name="small")


@pytest.fixture(scope="module")
def small_on_cpu(small: Network) -> CompiledNetwork:
    return compile_network(small, target("llvm"))


# ---- what it computes -------------------------------------------------------------------------


def test_small_network_equals_onnxruntime(small_on_cpu: CompiledNetwork) -> None:
    for seed in (1, 2):
        inputs = small_on_cpu.network.random_inputs(seed)
        expected = run_onnxruntime(small_model(), inputs)
        np.testing.assert_allclose(small_on_cpu.run(inputs)[0], expected[0], rtol=1e-4, atol=1e-6)
    assert np.ptp(expected[0]) > 0.01


def test_alexnet_with_random_weights_equals_onnxruntime() -> None:
    model = with_random_weights(read_onnx(onnx_model_zoo_path("alexnet")), seed=7)
    network = import_onnx(model, name="alexnet")
    compiled = compile_network(network, target("llvm"))
    results = []
    for seed in (1, 2):
        inputs = network.random_inputs(seed)
        (expected,) = run_onnxruntime(model, inputs)
        (result,) = compiled.run(inputs)
        # 1000 probabilities over many orders of magnitude, after sums of up to 9216 products.
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-7)
        results.append(result)
    # The outputs carry information: far from uniform, and they follow the input.
    assert results[0].max() > 10 * np.median(results[0])
    assert np.abs(results[0] - results[1]).max() > 0.01 * results[0].max()


def test_a_network_with_several_outputs_and_inputs() -> None:
    nodes = [
        helper.make_node("Add", ["a.x", "b"], ["total"]),
        helper.make_node("Mul", ["a.x", "b"], ["product"]),
    ]
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 5])
        for name in ("a.x", "b", "total", "product")
    ]
    graph = helper.make_graph(nodes, "two", infos[:2], infos[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    network = import_onnx(model, name="two")
    assert network.outputs == ("total", "product")
    inputs = network.random_inputs(3)
    total, product = compile_network(network, target("llvm")).run(inputs)
    np.testing.assert_allclose(total, inputs["a.x"] + inputs["b"], rtol=1e-6)
    np.testing.assert_allclose(product, inputs["a.x"] * inputs["b"], rtol=1e-6)


# ---- tasks and the database -------------------------------------------------------------------


def test_tasks_are_the_kernels_without_reshapes(small: Network) -> None:
    tasks = {task.name: task for task in extract_tasks(small, target("nvidia/nvidia-a100"))}
    assert len(tasks) == 4  # conv + bias + relu, pool, matmul + bias, softmax
    conv = next(task for name, task in tasks.items() if "conv2d" in name)
    products = 2 * 8 * 16 * 16 * 3 * 3 * 3
    assert products <= conv.flop <= 1.1 * products
    assert all(task.weight == 1 for task in tasks.values())
    assert not any("reshape" in name for name in tasks)


def test_kernels_whose_sizes_depend_on_data_are_no_tasks_but_run() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Cast", ["places"], ["y"], to=TensorProto.FLOAT),
        helper.make_node("Relu", ["x"], ["z"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 5])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, None])
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, [4, 5])
    graph = helper.make_graph(nodes, "places", [x], [y, z])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    network = import_onnx(model, name="places")
    (task,) = extract_tasks(network, target("nvidia/nvidia-a100"))
    assert "relu" in task.name
    inputs = {"x": np.eye(4, 5, dtype=np.float32) - 0.5}
    results = compile_network(network, target("llvm")).run(inputs)
    for result, expected in zip(results, run_onnxruntime(model, inputs), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_equal_layers_become_one_task_with_their_number_as_weight() -> None:
    network = load_onnx(onnx_model_zoo_path("squeezenet"))
    tasks = extract_tasks(network, target("nvidia/nvidia-a100"))
    convolutions = sum(task.weight for task in tasks if "conv2d" in task.name)
    assert convolutions == 26
    assert len({task.name for task in tasks}) == len(tasks) < 40


@pytest.fixture(scope="module")
def intrinsics() -> None:
    from tvm_energy.meta_schedule import compat

    compat.import_tensor_intrinsics()


def database_with_one_record(network: Network, where: Any, wanted: str) -> Any:
    """A stock database that holds a scheduled, never measured record of one kernel."""
    from tvm.s_tir import meta_schedule as ms

    task = next(item for item in extract_tasks(network, where) if wanted in item.name)
    context = ms.TuneContext(
        mod=task.mod,
        target=where,
        space_generator="post-order-apply",
        search_strategy="replay-trace",
        task_name=task.name,
        rand_state=1,
        num_threads=1,
    )
    space = context.generate_design_space()
    context.pre_tuning(max_trials=1, num_trials_per_iter=1, design_spaces=space)
    (candidate,) = context.generate_measure_candidates()
    context.post_tuning()
    database = ms.database.MemoryDatabase()
    record = ms.database.TuningRecord(
        candidate.sch.trace,
        database.commit_workload(task.mod),
        [1e-3],
        where,
        candidate.args_info,
    )
    database.commit_tuning_record(record)
    return database


@pytest.mark.usefixtures("intrinsics")
def test_a_tuned_kernel_is_found_and_the_network_still_computes_the_same(small: Network) -> None:
    where = target({"kind": "llvm", "num-cores": 2})
    compiled = compile_network(small, where, database_with_one_record(small, where, "conv2d"))
    assert [kernel for kernel in compiled.tuned if "conv2d" in kernel] == compiled.tuned
    assert len(compiled.tuned) == 1
    assert len(compiled.untuned) == 3
    inputs = small.random_inputs(5)
    expected = run_onnxruntime(small_model(), inputs)
    np.testing.assert_allclose(compiled.run(inputs)[0], expected[0], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("intrinsics")
def test_every_cuda_kernel_is_scheduled_tuned_or_not(small: Network) -> None:
    where = target("nvidia/nvidia-a100")
    untuned = compile_network(small, where)
    assert untuned.tuned == []
    assert len(untuned.untuned) == 4
    tuned = compile_network(small, where, database_with_one_record(small, where, "conv2d"))
    assert len(tuned.tuned) == 1
    assert "conv2d" in tuned.tuned[0]


def test_an_empty_database_leaves_every_kernel_untuned(small: Network) -> None:
    from tvm.s_tir import meta_schedule as ms

    compiled = compile_network(small, target("llvm"), ms.database.MemoryDatabase())
    assert compiled.tuned == []
    assert len(compiled.untuned) == 4


def test_lowering_is_repeatable(small: Network) -> None:
    from tvm_ffi import structural_equal

    where = target("llvm")
    assert structural_equal(lower(small, where), lower(small, where))
    assert not structural_equal(lower(small, where), small.mod)


# ---- running ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        ({}, ["inputs are image", "got none"]),
        ({"imag": np.zeros(IMAGE, np.float32)}, ["image", "imag"]),
        ({"image": np.zeros((2, 3, 16, 16), np.float32)}, ["(1, 3, 16, 16)", "(2, 3, 16, 16)"]),
        ({"image": np.zeros(IMAGE, np.float64)}, ["float32", "float64"]),
    ],
)
def test_wrong_arrays_are_refused(
    small_on_cpu: CompiledNetwork, inputs: dict[str, np.ndarray], parts: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        small_on_cpu.run(inputs)
    for part in parts:
        assert part in str(error.value)


def test_random_inputs_are_seeded(small: Network) -> None:
    first, again, other = (small.random_inputs(seed)["image"] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.dtype == np.float32


# ---- random weights ---------------------------------------------------------------------------


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_every_weight_of_squeezenet_becomes_random_and_repeatable() -> None:
    plain = read_onnx(onnx_model_zoo_path("squeezenet"))
    before = plain.SerializeToString()
    model = with_random_weights(plain, seed=1)
    assert plain.SerializeToString() == before
    again, other = with_random_weights(plain, seed=1), with_random_weights(plain, seed=2)
    assert model.SerializeToString() == again.SerializeToString()
    assert model.SerializeToString() != other.SerializeToString()
    onnx.checker.check_model(model)
    values = weights(model)
    assert len(values) == 2 * 26
    assert all(array.std() > 0 for array in values.values())
    assert not [node for node in model.graph.node if node.op_type == "ConstantOfShape"]
    fan_in = np.prod(values["conv10_w_0"].shape[1:])
    assert values["conv10_w_0"].std() == pytest.approx(np.sqrt(2 / fan_in), rel=0.05)


@pytest.mark.parametrize("name", ["resnet50", "shufflenet", "inception_v1", "densenet121"])
def test_zoo_outputs_mean_something_with_random_weights(name: str) -> None:
    model = with_random_weights(read_onnx(onnx_model_zoo_path(name)), seed=0)
    (info,) = model.graph.input
    shape = tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)
    network = Network(
        name=name,
        mod=None,
        params={},
        inputs={info.name: InputSpec(shape, "float32")},
        outputs=(),
        source="",
    )
    first, second = (run_onnxruntime(model, network.random_inputs(seed))[0] for seed in (0, 1))
    assert np.isfinite(first).all()
    assert np.ptp(first) > 1e-3  # not uniform, ...
    assert np.abs(first - second).max() > 0.01 * np.abs(first).max()  # ... and not saturated


def test_constants_that_are_no_weights_are_kept() -> None:
    constants = [
        numpy_helper.from_array(np.float32([1e-5]), "epsilon"),
        numpy_helper.from_array(np.int64([0, -1]), "shape"),
        numpy_helper.from_array(np.ones((4, 6), np.float32), "w"),
        numpy_helper.from_array(np.float32([1.0, 2.0]), "unused"),
    ]
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["flat"]),
        helper.make_node("Add", ["flat", "epsilon"], ["shifted"]),
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["shifted", "wt"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], constants), ir_version=8)
    values = weights(with_random_weights(model, seed=0))
    assert values["epsilon"] == np.float32(1e-5)
    assert values["shape"].tolist() == [0, -1]
    assert values["w"].std() > 0
    assert "unused" not in values


# ---- reading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ONNX_MODEL_ZOO))
def test_the_zoo_is_there_and_its_only_true_input_is_the_image(name: str) -> None:
    network = load_onnx(onnx_model_zoo_path(name))
    (spec,) = network.inputs.values()
    assert spec == InputSpec((1, 3, 224, 224), "float32")
    assert len(network.mod["main"].params) == 1


def test_weights_listed_as_inputs_are_no_inputs(small: Network) -> None:
    assert dict(small.inputs) == {"image": InputSpec((1, 3, 16, 16), "float32")}


def test_open_shapes_take_the_given_sizes(tmp_path: Path) -> None:
    path = saved(small_model(["N", 3, None, 16]), tmp_path)
    network = load_onnx(path, input_shapes={"image": IMAGE})
    assert network.inputs["image"].shape == (1, 3, 16, 16)
    assert network.name == "small"
    assert network.source == str(path)
    inputs = network.random_inputs(1)
    (result,) = compile_network(network, target("llvm")).run(inputs)
    np.testing.assert_allclose(
        result, run_onnxruntime(small_model(), inputs)[0], rtol=1e-4, atol=1e-6
    )


def test_external_weights_are_read_from_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    onnx.save(small_model(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert weights(read_onnx(path)).keys() == weights(small_model()).keys()
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ConfigurationError, match=r"external weights .* beside the \.onnx file"):
        read_onnx(path)


@pytest.mark.parametrize(
    ("shape", "given", "parts"),
    [
        (["N", 3, 16, 16], {}, ["image (N,3,16,16)", "--input-shape image=1,3,224,224"]),
        ([None, 3, 16, 16], {}, ["image (?,3,16,16)"]),
        (IMAGE, {"imag": IMAGE}, ["'imag'", "did you mean 'image'"]),
        (IMAGE, {"conv.w": [8, 3, 3, 3]}, ["'conv.w'", "image"]),
        (["N", 3, 16, 16], {"image": [1, 4, 16, 16]}, ["(1, 4, 16, 16)", "N,3,16,16"]),
        (["N", 3, 16, 16], {"image": [1, 3, 16]}, ["(1, 3, 16)", "N,3,16,16"]),
        (["N", 3, 16, 16], {"image": [0, 3, 16, 16]}, ["positive", "(0, 3, 16, 16)"]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    tmp_path: Path, shape: list[Any], given: dict[str, list[int]], parts: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        load_onnx(saved(small_model(shape), tmp_path), input_shapes=given)
    for part in parts:
        assert part in str(error.value)


def test_files_that_are_no_network_are_refused(tmp_path: Path) -> None:
    contents = {
        "empty.onnx": b"",
        "text.onnx": b"This is a shopping list: milk, bread, butter.",
        "random.onnx": np.random.default_rng(0).bytes(4096),
        "hollow.onnx": helper.make_model(helper.make_graph([], "g", [], [])).SerializeToString(),
        "cut.onnx": small_model().SerializeToString()[:-3000],
        "json.json": b"{",
    }
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=name):
            load_onnx(path)
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_onnx(tmp_path / "missing.onnx")
    with pytest.raises(ConfigurationError, match="is a directory"):
        load_onnx(tmp_path)


def test_unsupported_operators_are_named() -> None:
    model = small_model()
    model.graph.node[1].op_type = "Sparkle"
    model.graph.node[1].domain = "com.example"
    with pytest.raises(ConfigurationError, match="operators of 'memory': Sparkle;"):
        import_onnx(model, name="odd")


def test_a_graph_that_tvm_cannot_import_is_refused() -> None:
    model = small_model()
    model.graph.node[4].input[1] = "conv.w"  # a 4-D weight for Gemm
    with pytest.raises(ConfigurationError, match="cannot import 'memory'"):
        import_onnx(model, name="wrong")


def test_unknown_zoo_network_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigurationError, match=r"'alexnets'.*did you mean 'alexnet'"):
        onnx_model_zoo_path("alexnets")


def test_without_the_onnx_package_the_extra_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['onnx'] = None\n"
        "from tvm_energy.meta_schedule.networks import load_onnx\n"
        "from tvm_energy.errors import ConfigurationError\n"
        "try: load_onnx(sys.argv[1])\n"
        "except ConfigurationError as error: print(error)"
    )
    path = saved(small_model(), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True
    )
    assert 'pip install "tvm-energy[onnx]"' in done.stdout
