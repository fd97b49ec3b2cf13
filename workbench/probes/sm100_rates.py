"""Rates of a Blackwell SM that the indexer's model assumes, each by a kernel of one CTA an SM."""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Vector, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from flashdsa.dsl import tmem
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.indexer.relu import doubled_relu

THREADS = 512
ITERATIONS = 64
CHAINS = 16
"""Independent results of a thread, so that latencies hide behind each other."""
COLUMNS = 32
PROBES = {
    "tcgen05.ld, B/clk/SM": THREADS * COLUMNS * 4,
    "max.f32, lanes/clk/SM": THREADS * CHAINS,
    "add.f32 of x and |x|, lanes/clk/SM": THREADS * CHAINS,
    "fma.rn.f32x2, lanes/clk/SM": THREADS * CHAINS,
}
"""What is measured -> how much of it an iteration does."""


@cute.jit
def step(values: cute.Tensor, address: Int32, thread: Int32, probe: cutlass.Constexpr) -> None:
    """One iteration."""
    if cutlass.const_expr(probe == 0):
        loaded = tmem.load_lane(address, 0, thread % WARPGROUP_SIZE, COLUMNS)
        values[0] = loaded[0] + loaded[COLUMNS - 1]
    else:
        for i in cutlass.range_constexpr(CHAINS):
            low, high = values[2 * i], values[2 * i + 1]
            if cutlass.const_expr(probe == 1):
                values[2 * i] = cute.arch.fmax(low, high)
            elif cutlass.const_expr(probe == 2):
                values[2 * i] = doubled_relu(low)
            else:
                both = (low, high)
                values[2 * i], values[2 * i + 1] = cute.arch.fma_packed_f32x2(both, both, both)


@cute.kernel
def rate_kernel(clocks: cute.Tensor, sums: cute.Tensor, probe: cutlass.Constexpr):
    """Clocks of ITERATIONS in each CTA, between barriers of all its threads."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    hold = SmemAllocator().allocate(Int32, 8)
    if warp == 0:
        tmem.allocate(hold, COLUMNS)
    tmem.before_sync()
    cute.arch.sync_threads()
    tmem.after_sync()
    address = hold.load()
    if thread < WARPGROUP_SIZE:
        tmem.store_lane(address, 0, thread, Vector.from_elements([Int32(0)] * COLUMNS, Int32))
        tmem.wait_stored()
    tmem.before_sync()
    values = cute.make_rmem_tensor(2 * CHAINS, Float32)
    for i in cutlass.range_constexpr(2 * CHAINS):
        values[i] = Float32(thread + i)
    cute.arch.sync_threads()
    tmem.after_sync()
    begin = Int32(cute.arch.clock())
    for _ in cutlass.range(ITERATIONS, unroll=1):
        step(values, address, thread, probe)
    tmem.before_sync()
    cute.arch.sync_threads()
    end = Int32(cute.arch.clock())
    total = Float32(0.0)
    for i in cutlass.range_constexpr(2 * CHAINS):
        total += values[i]
    sums[cta * THREADS + thread] = total
    if thread == 0:
        clocks[cta] = end - begin
    if warp == 0:
        tmem.after_sync()
        tmem.free(address, COLUMNS)


@cute.jit
def launch_rate(
    clocks: cute.Tensor, sums: cute.Tensor, probe: cutlass.Constexpr, stream: Any
) -> None:
    """One CTA for each of `clocks`."""
    rate_kernel(clocks, sums, probe).launch(
        grid=[clocks.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1
    )


def run_probe(name: str, emulated: bool) -> float | None:
    """The rate of one SM, the slowest of all; None on ptxemu, which only shows that it runs."""
    probe = list(PROBES).index(name)
    if emulated:
        import ptxemu.cutedsl
    tensor = partial(make_fake_compact_tensor, stride_order=(0,), assumed_align=4)
    function = cute.compile(
        launch_rate,
        tensor(Int32, (cute.sym_int32(),)),
        tensor(Float32, (cute.sym_int32(),)),
        probe,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi --gpu-arch sm_100a",
    )
    if emulated:
        with ptxemu.cutedsl.emulate(arch="sm_100a", on_finding="raise"):
            function(torch.zeros(1, dtype=torch.int32), torch.zeros(THREADS))
        return None
    ctas = torch.cuda.get_device_properties(0).multi_processor_count
    clocks = torch.zeros(ctas, dtype=torch.int32, device="cuda")
    sums = torch.zeros(ctas * THREADS, device="cuda")
    for _ in range(3):  # the first launches load the code
        function(clocks, sums)
    return PROBES[name] * ITERATIONS / int(clocks.max())
