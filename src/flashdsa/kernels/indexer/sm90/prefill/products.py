"""The wgmmas of a tile: 64 keys against all columns of the queries, both from shared memory.

The warpgroups multiply bf16 keys in turns, so that one adds up while the other multiplies.
Otherwise both do the same at the same time, and tensor cores wait for sums. Products of e4m3 keys
take half as long, and turns cost them more than they gain.
"""

from typing import Any

from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.wgmma import matrix_descriptor, mma_async
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.plan import SPAN_BYTES

MMA_BYTES = 32
"""Bytes of a row that one wgmma multiplies."""
CHUNK_STEPS = SPAN_BYTES // MMA_BYTES
"""Wgmmas along a span."""
ATOM_BYTES = 1024
"""Eight rows of 128 bytes: the stride between swizzle atoms."""
OPCODES = {
    "float8_e4m3fn": ("wgmma.mma_async.sync.aligned.m64n{}k32.f32.e4m3.e4m3", ()),
    "bfloat16": ("wgmma.mma_async.sync.aligned.m64n{}k16.f32.bf16.bf16", (0, 0)),
}
"""Instruction by dtype, and whether either operand is transposed where that can be said."""
FIRST_TURN = 6
"""The named barrier of warpgroup 0's turns; warpgroup 1's is the next one."""


def of_tile(plan: Any) -> int:
    """fp32 of a product in a thread."""
    return int(plan.columns // 2)


def low_word(address: Any) -> Any:
    """Low word of the descriptor of rows at a shared memory address."""
    return Int32(matrix_descriptor(address, 16, ATOM_BYTES, "SW128"))


def descriptor(low: Any, offset: int) -> Any:
    """The descriptor `offset` bytes after that of `low`. Only low words differ."""
    high = (ATOM_BYTES >> 4 | 1 << 30) << 32
    return Int64(Uint32(low + Int32(offset >> 4))) | Int64(high)


def multiply(accumulator: Any, keys: Any, queries: Any, plan: Any) -> None:
    """Start keys x queries as one group, or in turns as two groups: the second is the last wgmma.
    `keys`, `queries`: low words of descriptors."""
    warpgroup.fence()
    opcode, transposes = OPCODES[plan.dtype]
    steps = [(chunk, step) for chunk in range(plan.chunks) for step in range(CHUNK_STEPS)]
    for chunk, step in steps:
        if plan.in_turns and (chunk, step) == steps[-1]:
            warpgroup.commit_group()
        values = mma_async(
            opcode.format(plan.columns),
            [accumulator[i] for i in range(of_tile(plan))],
            descriptor(keys, chunk * plan.key_chunk_bytes + step * MMA_BYTES),
            descriptor(queries, chunk * plan.query_chunk_bytes + step * MMA_BYTES),
            accumulate=(chunk, step) != (0, 0),
            transposes=transposes,
        )
        for i in range(of_tile(plan)):
            accumulator[i] = values[i]
    warpgroup.commit_group()


def wait_for_turn(barrier: Int32) -> None:
    """Wait until the other warpgroup has passed the turn on. barrier: of the calling one."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP_SIZE)


def pass_turn(barrier: Int32) -> None:
    """Let the other warpgroup multiply. barrier: its own."""
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP_SIZE)
