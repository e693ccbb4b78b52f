"""Every workload: its text form, its kernel against numpy, its CUDA design space."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_energy.errors import ConfigurationError
from tvm_energy.meta_schedule.workloads import MAX_ELEMENTS, WORKLOADS, parse_workload

# Small, uneven sizes: a swapped axis or a wrong border cannot hide.
SMALL = [
    "matmul:m=7,n=9,k=33",
    "matmul:m=16,n=16,k=32,dtype=float16",
    "matmul:m=16,n=8,k=32,dtype=float16,out_dtype=float32",
    "batch_matmul:b=3,m=5,n=4,k=17",
    "batch_matmul:b=2,m=5,n=4,k=17,dtype=float16,out_dtype=float32",
    "matvec:m=11,k=65",
    "matvec:m=11,k=65,dtype=float16,out_dtype=float32",
    "dense:m=3,n=7,k=19",
    "dense:m=3,n=7,k=19,dtype=float16,out_dtype=float32",
    "conv2d:n=2,ci=4,h=9,w=7,co=6,kernel=3",
    "conv2d:n=1,ci=3,h=11,w=8,co=5,kernel=3,stride=2,padding=0,dilation=2",
    "conv2d:n=1,ci=6,h=9,w=7,co=4,kernel=2,stride=3,padding=2,groups=2",
    "conv2d:n=1,ci=4,h=6,w=7,co=6,kernel=3,dtype=float16",
    "conv2d_nhwc:n=2,h=9,w=7,ci=4,co=6,kernel=3,stride=2",
    "conv2d_nhwc:n=1,h=9,w=8,ci=4,co=6,kernel=3,padding=0,dilation=2",
    "depthwise_conv2d:n=2,c=5,h=9,w=7,kernel=3,stride=2",
    "depthwise_conv2d:n=1,c=5,h=9,w=8,kernel=3,padding=2,dilation=2",
    "conv1d:n=2,ci=3,length=17,co=5,kernel=4,stride=2,padding=1,dilation=3",
    "conv2d_transpose:n=2,ci=3,h=5,w=4,co=6,kernel=4,stride=2,padding=1",
    "conv2d_transpose:n=1,ci=3,h=5,w=4,co=2,kernel=3,stride=3,padding=0",
    "conv2d_transpose:n=1,ci=3,h=5,w=4,co=2,kernel=2,stride=3,padding=1",
    "max_pool2d:n=2,c=3,h=9,w=7,kernel=3,stride=2,padding=1",
    "avg_pool2d:n=2,c=3,h=9,w=7,kernel=3,stride=2,padding=1",
    "avg_pool2d:n=1,c=3,h=8,w=7,kernel=2,stride=1,padding=0,dtype=float16",
    "softmax:rows=5,cols=37",
    "softmax:rows=2,cols=4096,dtype=float16",
    "layernorm:rows=5,cols=37",
    "layernorm:rows=5,cols=37,dtype=float16",
    "reduce_sum:rows=5,cols=37",
    "reduce_sum:rows=3,cols=65536,dtype=float16",
    "add:size=37",
    "relu:size=37,dtype=float16",
]


def test_the_list_above_covers_every_workload() -> None:
    assert {parse_workload(text).name for text in SMALL} == set(WORKLOADS)


@pytest.mark.parametrize("text", SMALL)
def test_unscheduled_kernel_equals_numpy(text: str) -> None:
    import tvm

    workload = parse_workload(text)
    library = tvm.compile(workload.primfunc(), target="llvm")
    inputs = workload.random_inputs(seed=3)
    output = workload.arguments[-1]
    device_arrays = [tvm.runtime.tensor(array) for array in inputs]
    result = tvm.runtime.tensor(np.full(output.shape, np.nan, output.dtype))
    library["main"](*device_arrays, result)
    (expected,) = workload.reference(inputs)
    assert expected.dtype == output.dtype
    assert np.ptp(expected) > 0  # a constant answer would prove nothing
    # Relative to the largest value: a softmax over 4096 columns has nothing above 0.001. A float16
    # result is rounded to 2**-11, at every step of the sum where that is float16 too.
    tolerance = 5e-3 if output.dtype == "float16" else 1e-5
    np.testing.assert_allclose(
        result.numpy(), expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )


@pytest.fixture(scope="module")
def a100():  # type: ignore[no-untyped-def]
    from tvm_energy.meta_schedule import compat

    compat.import_tensor_intrinsics()
    from tvm.target import Target

    return Target("nvidia/nvidia-a100")


@pytest.mark.parametrize("name", list(WORKLOADS))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cuda_design_space_holds_a_valid_candidate(name: str, dtype: str, a100) -> None:  # type: ignore[no-untyped-def]
    import tvm
    from tvm.s_tir import meta_schedule as ms

    workload = parse_workload(f"{name}:dtype={dtype}")
    context = ms.TuneContext(
        mod=tvm.IRModule({"main": workload.primfunc()}),
        target=a100,
        space_generator="post-order-apply",
        search_strategy="replay-trace",
        task_name=name,
        rand_state=1,
        num_threads=1,
    )
    space = context.generate_design_space()
    assert len(space) > 0
    context.pre_tuning(max_trials=2, num_trials_per_iter=2, design_spaces=space)
    candidates = context.generate_measure_candidates()
    context.post_tuning()
    assert candidates
    source = tvm.compile(candidates[0].sch.mod, target=a100).mod.imports[0].inspect_source()
    assert "__global__" in source


def test_listing_imports_no_tvm() -> None:
    code = (
        "import sys; from tvm_energy.meta_schedule.workloads import parse_workload;"
        "parse_workload('matmul'); sys.exit('tvm' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_defaults_parse_and_the_canonical_text_reads_back(name: str) -> None:
    workload = parse_workload(name)
    assert parse_workload(workload.spec) == workload
    assert [item.output for item in workload.arguments].count(True) == 1
    assert workload.arguments[-1].output
    assert {p.name for p in WORKLOADS[name].parameters} == set(workload.parameters)
    assert all(p.meaning for p in WORKLOADS[name].parameters)


@given(m=st.integers(1, 4096), n=st.integers(1, 4096), k=st.integers(1, 4096))
def test_canonical_text_is_independent_of_order(m: int, n: int, k: int) -> None:
    one = parse_workload(f"matmul:m={m},n={n},k={k}")
    other = parse_workload(f" matmul : k={k}, n={n} ,m={m}, dtype=float32 ")
    assert one == other
    assert one.arguments[-1].shape == (m, n)


def test_out_dtype_follows_dtype_unless_given() -> None:
    assert parse_workload("matmul:dtype=float16").arguments[-1].dtype == "float16"
    mixed = parse_workload("matmul:dtype=float16,out_dtype=float32")
    assert [item.dtype for item in mixed.arguments] == ["float16", "float16", "float32"]


def test_random_inputs_are_seeded_and_spread() -> None:
    workload = parse_workload("matmul:m=64,n=64,k=64")
    first, again, other = (workload.random_inputs(seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    assert -1 <= first[0].min() < -0.9
    assert 0.9 < first[0].max() < 1


def test_argument_sizes_in_bytes() -> None:
    sizes = [item.size_bytes for item in parse_workload("matvec:m=8,k=16").arguments]
    assert sizes == [8 * 16 * 4, 16 * 4, 8 * 4]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["matmul", "conv2d"]),
        ("matmull:m=1", ["'matmull'", "did you mean 'matmul'"]),
        ("Conv2D", ["did you mean 'conv2d'"]),
        ("matmul:q=1", ["'q'", "m, n, k, dtype, out_dtype"]),
        ("conv2d:strides=2", ["'strides'", "did you mean 'stride'"]),
        ("matmul:m", ["'m'", "PARAMETER=VALUE"]),
        ("matmul:m=", ["PARAMETER=VALUE"]),
        ("matmul:m=1,m=2", ["'m'", "twice"]),
        ("matmul:m=1.5", ["m='1.5'", "integer"]),
        ("matmul:m=0", ["m=0", "from 1"]),
        ("matmul:m=-3", ["m=-3"]),
        ("conv2d:padding=-1", ["padding=-1", "from 0"]),
        ("matmul:dtype=float", ["'float'", "float32, float16"]),
        ("matmul:out_dtype=float16", ["out_dtype=float16", "dtype=float16"]),
        ("conv2d:kernel=7,padding=0,h=5", ["kernel=7", "h=5"]),
        ("conv2d:dilation=40", ["reaches over 81", "h=56"]),
        ("conv2d:groups=3", ["groups=3", "ci=64"]),
        ("conv2d:co=6,groups=4", ["groups=4", "co=6"]),
        ("max_pool2d:kernel=2,padding=2", ["padding=2", "kernel=2"]),
        ("conv2d_transpose:kernel=2,padding=2", ["padding=2", "kernel=2"]),
        ("conv2d_transpose:kernel=3,padding=2,h=1", ["padding=2", "nothing"]),
        ("matmul:m=1048576,k=1048576", ["'a'", str(MAX_ELEMENTS)]),
    ],
)
def test_bad_text_is_refused_with_what_is_valid(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_workload(text)
    for part in parts:
        assert part in str(error.value)


def test_reference_refuses_other_shapes() -> None:
    workload = parse_workload("matmul:m=2,n=3,k=4")
    with pytest.raises(ValueError, match="takes inputs of shapes"):
        workload.reference(workload.random_inputs(0)[::-1])
