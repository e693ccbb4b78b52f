"""Loops whose counts can be worked out by hand."""

from __future__ import annotations

import pytest

from tvm_energy.simulation.addresses import Node, const, var
from tvm_energy.simulation.kernel import KernelLaunch
from tvm_energy.simulation.loop_analysis import describe
from tvm_energy.simulation.loop_nest import Access, Branch, Kernel, Loop, Statement, Tree

BLOCKS, THREADS = 8, 128
WARPS = BLOCKS * THREADS // 32


def plus(*parts: Node) -> Node:
    total = parts[0]
    for part in parts[1:]:
        total = ("+", total, part)
    return total


def times(part: Node, factor: int) -> Node:
    return ("*", part, const(factor))


def load(buffer: str, index: Node, scope: str = "global", elements: int = 1 << 20) -> Access:
    return Access(buffer, scope, 4, elements, index, store=False)


def store(buffer: str, index: Node, scope: str = "global", elements: int = 1 << 20) -> Access:
    return Access(buffer, scope, 4, elements, index, store=True)


def statement(*accesses: Access, **operations: float) -> Statement:
    keys = frozenset().union(*(access.keys for access in accesses))
    return Statement(list(accesses), operations, keys)


def loop(key: str, extent: int, *body: Tree, kind: str = "serial") -> Loop:
    return Loop(key, const(extent), kind, list(body))


def kernel(*body: Tree, **changes: object) -> KernelLaunch:
    values: dict[str, object] = {
        "name": "k",
        "blocks": {"block": BLOCKS},
        "threads": {"thread": THREADS},
        "body": list(body),
    }
    return describe(Kernel(**{**values, **changes}))  # type: ignore[arg-type]


THREAD = plus(times(var("block"), THREADS), var("thread"))


def test_elementwise() -> None:
    launch = kernel(statement(load("x", THREAD), store("y", THREAD), fp32=1.0))
    assert launch.instructions.fp32 == WARPS
    assert launch.flops == BLOCKS * THREADS
    read, written = launch.global_accesses
    for access in (read, written):
        assert access.requests == WARPS
        assert access.bytes_requested == BLOCKS * THREADS * 4
        assert access.sectors == WARPS * 4
        assert access.lines == WARPS
        assert access.unique_bytes == BLOCKS * THREADS * 4
    assert not read.store
    assert written.store
    assert launch.dependent_loads == 1


def test_strided_loads_need_a_sector_a_thread() -> None:
    launch = kernel(statement(load("x", times(THREAD, 64))))
    (access,) = launch.global_accesses
    assert access.sectors == WARPS * 32
    assert access.unique_bytes == BLOCKS * THREADS * 32


def test_vector_loops_load_wide_and_unrolled_ones_do_not() -> None:
    index = plus(times(THREAD, 4), var("v"))
    (wide,) = kernel(loop("v", 4, statement(load("x", index)), kind="vector")).global_accesses
    (narrow,) = kernel(loop("v", 4, statement(load("x", index)))).global_accesses
    assert wide.requests == WARPS
    assert narrow.requests == 4 * WARPS
    assert wide.bytes_requested == narrow.bytes_requested
    assert wide.sectors == WARPS * 16
    assert narrow.sectors == 4 * WARPS * 16


def test_a_reduction_keeps_its_sum_in_a_register() -> None:
    sum_index = THREAD
    body = loop(
        "k",
        1000,
        statement(
            load("x", plus(times(THREAD, 1000), var("k"))),
            load("y", sum_index),
            store("y", sum_index),
            fp32=1.0,
        ),
    )
    launch = kernel(body)
    by_name = {(access.buffer, access.store): access for access in launch.global_accesses}
    assert by_name["x", False].requests == 1000 * WARPS
    assert by_name["y", True].requests == WARPS
    assert launch.instructions.fp32 == 1000 * WARPS
    assert launch.ilp == 1


def matmul_tile(steps: int, unroll: int = 0, tile: int = 8) -> KernelLaunch:
    """Each thread computes tile x tile sums from two shared arrays."""
    thread_row, thread_column = ("//", var("thread"), const(16)), ("%", var("thread"), const(16))
    a = load("a", plus(times(var("k"), 64), times(thread_row, tile), var("i")), "shared", 4096)
    b = load("b", plus(times(var("k"), 128), times(thread_column, tile), var("j")), "shared", 4096)
    total = plus(times(var("i"), tile), var("j"))
    body = loop(
        "k",
        steps,
        loop(
            "i",
            tile,
            loop(
                "j",
                tile,
                statement(
                    a,
                    b,
                    load("c", total, "local", tile * tile),
                    store("c", total, "local", tile * tile),
                    fma32=1.0,
                ),
            ),
        ),
    )
    return kernel(body, unroll_steps=unroll, local_bytes={"c": 4 * tile * tile})


def test_register_tile() -> None:
    launch = matmul_tile(steps=16)
    assert launch.flops == 2 * 16 * 64 * BLOCKS * THREADS
    assert launch.ilp == 8
    # 8 + 8 values a step, four in one access.
    assert launch.shared.load_requests == 16 * 4 * WARPS
    assert launch.registers_per_thread >= 64


def test_unrolling_the_reduction_changes_control_and_not_work() -> None:
    rolled, unrolled = matmul_tile(steps=16), matmul_tile(steps=16, unroll=2048)
    assert unrolled.flops == rolled.flops
    assert unrolled.instructions.control < rolled.instructions.control


def test_indices_of_loops_that_stay_loops_move_arrays_to_memory() -> None:
    rolled, unrolled = matmul_tile(steps=4, tile=16), matmul_tile(steps=4, tile=16, unroll=4096)
    assert any(access.buffer == "local:c" for access in rolled.global_accesses)
    assert not any(access.buffer == "local:c" for access in unrolled.global_accesses)


def test_too_many_registers_spill() -> None:
    launch = matmul_tile(steps=4, tile=20, unroll=4096)
    assert launch.registers_per_thread == 255
    assert any(access.buffer == "local:spill" for access in launch.global_accesses)


def test_bank_conflicts_are_seen() -> None:
    def column(pitch: int) -> KernelLaunch:
        return kernel(statement(load("s", times(var("thread"), pitch), "shared", 8192), fp32=1.0))

    assert column(32).shared.load_wavefronts == 32 * WARPS
    assert column(33).shared.load_wavefronts == WARPS


def test_a_branch_of_whole_warps_saves_instructions_and_one_within_a_warp_does_not() -> None:
    def masked(limit: int) -> KernelLaunch:
        inside = ("<", var("thread"), const(limit))
        return kernel(Branch(inside, [statement(load("x", THREAD), fp32=1.0)]))

    half, part = masked(64), masked(8)
    assert half.instructions.fp32 == WARPS / 2
    assert half.lane_share == 1
    assert part.instructions.fp32 == WARPS / 4
    assert part.lane_share == 0.25
    assert part.flops == BLOCKS * 8


def test_a_partly_filled_last_warp_wastes_lanes() -> None:
    launch = kernel(statement(store("x", THREAD), fp32=1.0), threads={"thread": 40})
    assert launch.warps_per_block == 2
    assert launch.flops == pytest.approx(BLOCKS * 40)


def test_virtual_threads_multiply_work_and_share_loads() -> None:
    shared = load("s", var("thread"), "shared", 128)
    total = const(0)
    index = plus(THREAD, times(var("vthread"), 1024))
    body = [
        statement(load("g", index), store("c", total, "local", 1), fp32=1.0),
        statement(shared, load("c", total, "local", 1), store("c", total, "local", 1), fma32=1.0),
    ]
    launch = kernel(*body, vthreads={"vthread": 4}, local_bytes={"c": 4})
    assert launch.instructions.fma32 == 4 * WARPS
    assert launch.shared.load_requests == WARPS
    assert launch.global_accesses[0].requests == 4 * WARPS


def test_reuse_within_a_block_and_among_blocks() -> None:
    # Every block reads the same 4 KiB table 100 times.
    table = load(
        "t", plus(times(var("k"), 0), plus(times(var("i"), 128), var("thread"))), elements=1024
    )
    barrier = Statement(operations={"barrier": 1.0})
    launch = kernel(loop("k", 100, barrier, loop("i", 8, statement(table))))
    (access,) = launch.global_accesses
    assert access.unique_bytes == 4096
    little, enough = access.block_reuse[0], access.block_reuse[-1]
    assert little[1] == pytest.approx(100 * 4096)
    assert enough == (4096, 4096)
    assert launch.barriers_per_block == 100


def test_neighbouring_blocks_share_rows() -> None:
    index = plus(times(("//", var("block"), const(4)), 4096), var("thread"))
    (access,) = kernel(statement(load("x", index))).global_accesses
    assert dict(access.launch_reuse)[1.0] == 512
    assert access.unique_bytes == 2 * 512
