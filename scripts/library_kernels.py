"""Kernels of tuned libraries, described by hand: matrix products and attention on tensor cores.

The kernels that cuBLAS or FlashAttention chose are not in the public measurements. A description here is what a
well-tiled kernel of that kind must do: blocks of tiles with edges padded, tiles loaded ahead into shared
memory, tensor cores reading them there, outputs written once. `gemms` gives several tilings of
one product; who wants a good kernel takes the fastest. What a tensor operation reads from shared memory and issues is
as in ``tensor_matmul`` of tests/simulation/kernels.py, on which the energy of a tensor operation was fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tvm_energy.simulation.kernel import (
    GlobalAccess,
    Instructions,
    KernelLaunch,
    KernelWork,
    SharedTraffic,
)

#: Rows and columns of the block's tile of the output.
TILES = ((16, 64), (32, 128), (64, 64), (64, 128), (64, 256), (128, 128), (128, 256), (256, 128))
#: Parts of the sum over k that blocks of their own compute.
SPLITS = (1, 2, 4, 8, 16)
_STEP = 64  # of k, from barrier to barrier
_STATIC_SHARED = 48 << 10
_FP16 = 2


def gemms(m: int, n: int, k: int) -> Iterator[KernelWork]:
    """C[m, n] = A[m, k] B[k, n] in float16 or bfloat16, in each sensible tiling."""
    for rows, columns in TILES:
        if (rows > 64 and rows >= 2 * m) or (columns > 64 and columns >= 2 * n):
            continue
        for split in SPLITS:
            if split == 1 or k // split >= 4 * _STEP:
                yield gemm(m, n, k, rows, columns, split)


def gemm(m: int, n: int, k: int, rows: int, columns: int, split: int = 1) -> KernelWork:
    """The product with tiles of ``rows`` x ``columns``; ``split`` > 1 adds up parts with atomics."""
    high, wide = math.ceil(m / rows), math.ceil(n / columns)
    tiles = high * wide
    blocks, depth = tiles * split, math.ceil(k / split / _STEP) * _STEP
    # Hopper's libraries pair blocks above each other, and what both need is sent to both at once (multicast).
    pair = 2 if rows >= 128 and high > 1 else 1
    loaded_a, loaded_b = rows * min(depth, k) * _FP16, columns * min(depth, k) * _FP16 / pair

    def curve(of_rows: bool) -> tuple[tuple[float, float], ...]:
        """Bytes of A or B that n consecutive blocks touch: they run in near-square patches."""
        points = []
        count = 1
        while True:
            patch = min(count, tiles)
            down = min(high, max(1, round(math.sqrt(patch * columns / rows))))
            across = min(wide, math.ceil(patch / down))
            layers = math.ceil(count / tiles)
            one = m * min(1.0, down / high) if of_rows else n * min(1.0, across / wide)
            points.append((float(count), one * _FP16 * min(k, layers * depth)))
            if count >= blocks:
                points[-1] = (float(count), float((m if of_rows else n) * k * _FP16))
                return tuple(points)
            count = min(blocks, count * 4)

    accesses = [
        _load("a", blocks, loaded_a, curve(True)),
        _load("b", blocks, loaded_b, curve(False)),
    ]
    if split == 1:
        accesses.append(_store("c", m * n * _FP16, blocks))
    else:  # float32 sums: each part is read and written in L2
        accesses.append(_store("c", m * n * 4.0 * split, blocks, unique=m * n * 4.0))
        accesses.append(_store("c", m * n * 4.0 * split, blocks, unique=m * n * 4.0))
    threads = 256 if rows * columns >= 128 * 128 else 128
    return _tensor_kernel(
        name="gemm",
        blocks=blocks,
        threads=threads,
        flops=2.0 * rows * columns * depth * blocks,
        registers=min(250, 40 + rows * columns // threads),
        shared=4 * (rows + columns) * _STEP * _FP16,
        steps=depth / _STEP,
        accesses=accesses,
    )


def decode_attention(
    batch: int, heads: int, kv_heads: int, head_dim: int, length: int
) -> KernelWork:
    """One new token of each sequence against ``length`` cached ones, keys and values in float16."""
    group = heads // kv_heads
    pairs = batch * kv_heads
    split = max(1, min(math.ceil(length / 256), math.ceil(512 / pairs)))
    blocks = pairs * split
    cached = 2.0 * pairs * length * head_dim * _FP16
    padded = max(16, 16 * math.ceil(group / 16))
    scores = float(pairs * padded * length)
    launch = _tensor_kernel(
        name="decode_attention",
        blocks=blocks,
        threads=128,
        flops=4.0 * scores * head_dim,
        registers=128,
        shared=2 * 64 * head_dim * _FP16,
        steps=math.ceil(length / split / 64),
        accesses=[
            _load("kv", blocks, cached / blocks, ((1.0, cached / blocks), (float(blocks), cached))),
            _store("o", batch * heads * head_dim * 4.0 * split, blocks),
        ],
        special=scores / 32,
        fp32=4 * scores / 32,
    ).launches[0]
    if split == 1:
        return KernelWork(launches=(launch,))
    partial = batch * heads * head_dim * 4.0 * split
    combine = KernelLaunch(
        name="combine",
        blocks=max(1, batch * heads // 4),
        threads_per_block=128,
        dependent_loads=2,
        instructions=Instructions(fma32=partial / 128, integer=partial / 256),
        global_accesses=(
            _load(
                "p",
                max(1, batch * heads // 4),
                partial / max(1, batch * heads // 4),
                ((1.0, partial),),
            ),
            _store("o", batch * heads * head_dim * _FP16, max(1, batch * heads // 4)),
        ),
    )
    return KernelWork(launches=(launch, combine))


def encoder_attention(batch: int, length: int, heads: int, head_dim: int) -> KernelWork:
    """All tokens against all, in tiles of 128 queries and 128 keys; heads padded to 64 or 96 columns."""
    width = 64 if head_dim <= 64 else 32 * math.ceil(head_dim / 32)
    tiles = math.ceil(length / 128)
    blocks = batch * heads * tiles
    scores = float(blocks * tiles * 128 * 128)
    cached = 2.0 * length * head_dim * _FP16  # of one head
    heads_kv = batch * heads * cached
    return _tensor_kernel(
        name="encoder_attention",
        blocks=blocks,
        threads=256,
        flops=4.0 * scores * width,
        registers=200,
        shared=4 * 128 * width * _FP16,
        steps=tiles,
        accesses=[
            _load("kv", blocks, cached, ((1.0, cached), (float(tiles), cached), (float(blocks), heads_kv))),
            _load("q", blocks, cached / 2 / tiles, ((1.0, cached / 2 / tiles), (float(blocks), heads_kv / 2))),
            _store("o", heads_kv / 2, blocks),
        ],
        special=scores / 32,
        fp32=4 * scores / 32,
    )  # fmt: skip


def _tensor_kernel(
    *,
    name: str,
    blocks: int,
    threads: int,
    flops: float,
    registers: int,
    shared: int,
    steps: float,
    accesses: list[GlobalAccess],
    special: float = 0.0,
    fp32: float = 0.0,
) -> KernelWork:
    launch = KernelLaunch(
        name=name,
        blocks=blocks,
        threads_per_block=threads,
        shared_bytes_per_block=min(shared, _STATIC_SHARED),
        registers_per_thread=registers,
        ilp=8,
        pipeline_stages=4,
        # Tiles are requested ahead: the first is waited for, and the store.
        dependent_loads=2,
        barriers_per_block=steps,
        instructions=Instructions(
            tensor_flops=flops,
            integer=flops / 32768,
            control=flops / 65536,
            special=special,
            fp32=fp32,
        ),
        shared=SharedTraffic(
            load_requests=flops / 32768, load_wavefronts=flops / 8192, load_bytes=flops / 64
        ),
        global_accesses=tuple(accesses),
    )
    return KernelWork(launches=(launch,))


def _load(
    buffer: str, blocks: int, each: float, curve: tuple[tuple[float, float], ...]
) -> GlobalAccess:
    return GlobalAccess(
        buffer=buffer,
        store=False,
        requests=blocks * each / 512,
        bytes_requested=blocks * each,
        sectors=blocks * each / 32,
        lines=blocks * each / 128,
        block_reuse=((0.0, each),),
        launch_reuse=curve,
    )


def _store(buffer: str, size: float, blocks: int, unique: float | None = None) -> GlobalAccess:
    kept = size if unique is None else unique
    return GlobalAccess(
        buffer=buffer,
        store=True,
        requests=size / 512,
        bytes_requested=size,
        sectors=size / 32,
        lines=size / 128,
        launch_reuse=((1.0, kept / blocks), (float(blocks), kept)),
    )
