"""Kernels written by hand, as plain numbers: what the anchors of the simulation run on."""

from __future__ import annotations

from tvm_energy.simulation.kernel import (
    GlobalAccess,
    Instructions,
    KernelLaunch,
    KernelWork,
    SharedTraffic,
)


def fma_loop(blocks: int, fmas: float) -> KernelWork:
    """Nothing but fused multiply-adds (``fmas`` warp instructions), 2048 threads an SM."""
    launch = KernelLaunch(
        name="fma_loop",
        blocks=blocks,
        threads_per_block=1024,
        ilp=4,
        instructions=Instructions(fma32=fmas, control=fmas / 64),
    )
    return KernelWork(launches=(launch,))


def stream(bytes_read: int, bytes_per_request: int = 512) -> KernelWork:
    """Read memory once, 64 KiB a block."""
    blocks = bytes_read // 65536
    access = GlobalAccess(
        buffer="x",
        store=False,
        requests=bytes_read / bytes_per_request,
        bytes_requested=bytes_read,
        sectors=bytes_read / 32,
        lines=bytes_read / 128,
        block_reuse=((0.0, 65536.0),),
        launch_reuse=((1.0, 65536.0), (float(blocks), float(bytes_read))),
    )
    launch = KernelLaunch(
        name="stream",
        blocks=blocks,
        threads_per_block=256,
        ilp=8,
        dependent_loads=2,
        instructions=Instructions(fp32=bytes_read / 128, integer=bytes_read / 512),
        global_accesses=(access,),
    )
    return KernelWork(launches=(launch,))


def tensor_matmul(size: int) -> KernelWork:
    """A float16 matrix product on tensor cores in tiles of 256 x 256, loading ahead."""
    flops, tile = 2.0 * size**3, 256
    blocks = (size // tile) ** 2
    loaded = blocks * 2.0 * tile * size * 2
    access = GlobalAccess(
        buffer="a",
        store=False,
        requests=loaded / 512,
        bytes_requested=loaded,
        sectors=loaded / 32,
        lines=loaded / 128,
        block_reuse=((0.0, loaded / blocks),),
        launch_reuse=((1.0, loaded / blocks), (float(blocks), size * size * 4.0)),
    )
    launch = KernelLaunch(
        name="tensor_matmul",
        blocks=blocks,
        threads_per_block=256,
        registers_per_thread=250,
        ilp=8,
        pipeline_stages=3,
        dependent_loads=size / 64,
        barriers_per_block=size / 64,
        instructions=Instructions(tensor_flops=flops, integer=flops / 32768, control=flops / 65536),
        shared=SharedTraffic(
            load_requests=flops / 32768, load_wavefronts=flops / 8192, load_bytes=flops / 64
        ),
        global_accesses=(access,),
    )
    return KernelWork(launches=(launch,))
