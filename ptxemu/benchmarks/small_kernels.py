"""Kernels that run.py times for one thing each: arithmetic, shared memory, waits, a CTA's start."""

from __future__ import annotations

import numpy as np
from kernels import Case

_HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 out)\n"
_STORE = """mul.wide.u32 %rd1, %r1, 4; add.u64 %rd1, %rd0, %rd1;
st.global.b32 [%rd1], %r6;
ret;
"""
_CHAINS, _LENGTH = 4, 64


def arithmetic(name: str, iterations: int) -> Case:
    """8 warps: a loop of 64 times the same instruction, `fma` or `add`, in four chains."""
    line = {"fma": "fma.rn.f32 %f{0}, %f{0}, %f4, %f5;", "add": "add.u32 %r{1}, %r{1}, %r1;"}[name]
    body = "\n".join(line.format(k % _CHAINS, 2 + k % _CHAINS) for k in range(_LENGTH))
    out = np.zeros(256, np.uint32)
    result = "mov.b32 %r6, %f0;" if name == "fma" else "mov.u32 %r6, %r2;"
    text = f"""{_HEAD}{{
.reg .pred %p0; .reg .b32 %r<8>; .reg .f32 %f<6>; .reg .b64 %rd<4>;
ld.param.u64 %rd0, [out];
mov.u32 %r0, 0; mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f4, %r1; mul.f32 %f4, %f4, 0f3A800000;
mov.f32 %f5, 0f3F800000;
mov.u32 %r2, %r1; mov.u32 %r3, %r1; mov.u32 %r4, %r1; mov.u32 %r5, %r1;
mov.f32 %f0, %f4; mov.f32 %f1, %f4; mov.f32 %f2, %f4; mov.f32 %f3, %f4;
LOOP:
{body}
add.u32 %r0, %r0, 1;
setp.lt.u32 %p0, %r0, {iterations};
@%p0 bra LOOP;
{result}
{_STORE}}}
"""

    def verify() -> None:
        lanes = np.arange(256)
        rounds = iterations * _LENGTH // _CHAINS
        if name == "add":
            np.testing.assert_array_equal(out, (lanes * (rounds + 1)).astype(np.uint32))
            return
        factor = (lanes / 1024).astype(np.float32)
        x = factor
        for _ in range(min(rounds, 200)):  # it has converged by then
            x = (x.astype(np.float64) * factor + 1).astype(np.float32)
        np.testing.assert_array_equal(out.view(np.float32), x)

    return Case(name, f"8 warps, {_LENGTH} {name} a round", text, 1, 256, 1, [out], verify)


def shared_gemm(size: int) -> Case:
    """C = A B of size x size floats: tiles of 16 x 16 in shared memory, a CTA of 256 a tile."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((size, size), np.float32) for _ in range(2))
    out = np.zeros((size, size), np.float32)
    tiles, row = size // 16, 4 * size
    products = "\n".join(
        f"ld.shared.f32 %f1, [%r8+{64 * k}]; ld.shared.f32 %f2, [%r7+{4 * k}];\n"
        "fma.rn.f32 %f0, %f1, %f2, %f0;"
        for k in range(16)
    )
    text = f"""{_HEAD[: _HEAD.index(".visible")]}
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c)
{{
.reg .pred %p0; .reg .b32 %r<12>; .reg .f32 %f<3>; .reg .b64 %rd<8>;
.shared .align 16 .b8 sa[1024]; .shared .align 16 .b8 sb[1024];
ld.param.u64 %rd0, [a]; ld.param.u64 %rd1, [b]; ld.param.u64 %rd2, [c];
mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 15; shr.u32 %r2, %r0, 4;
mov.u32 %r3, %ctaid.x; rem.u32 %r4, %r3, {tiles}; div.u32 %r3, %r3, {tiles};
mad.lo.u32 %r3, %r3, 16, %r2; mad.lo.u32 %r4, %r4, 16, %r1;
mad.lo.u32 %r5, %r3, {size}, %r1; mul.wide.u32 %rd3, %r5, 4; add.u64 %rd0, %rd0, %rd3;
mad.lo.u32 %r5, %r2, {size}, %r4; mul.wide.u32 %rd3, %r5, 4; add.u64 %rd1, %rd1, %rd3;
mad.lo.u32 %r5, %r3, {size}, %r4; mul.wide.u32 %rd3, %r5, 4; add.u64 %rd2, %rd2, %rd3;
mov.u32 %r5, sa; mov.u32 %r6, sb;
mad.lo.u32 %r7, %r2, 64, %r5; mad.lo.u32 %r8, %r1, 4, %r6;
mad.lo.u32 %r9, %r0, 4, %r5; mad.lo.u32 %r10, %r0, 4, %r6;
mov.u32 %r11, 0; mov.f32 %f0, 0f00000000;
LOOP:
ld.global.f32 %f1, [%rd0]; st.shared.f32 [%r9], %f1;
ld.global.f32 %f2, [%rd1]; st.shared.f32 [%r10], %f2;
bar.sync 0;
{products}
bar.sync 0;
add.u64 %rd0, %rd0, 64; add.u64 %rd1, %rd1, {16 * row};
add.u32 %r11, %r11, 1; setp.lt.u32 %p0, %r11, {tiles};
@%p0 bra LOOP;
st.global.f32 [%rd2], %f0;
ret;
}}
"""

    def verify() -> None:
        np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-4)

    about = f"{size} x {size} floats by tiles of 16 x 16 in shared memory"
    return Case("shared_gemm", about, text, tiles * tiles, 256, 1, [a, b, out], verify)


def state_waits(rounds: int) -> Case:
    """8 warps meet at an mbarrier, each lane waiting for its own state, as cuda::barrier does."""
    out = np.zeros(256, np.uint32)
    text = f"""{_HEAD}{{
.reg .pred %p<3>; .reg .b32 %r<8>; .reg .b64 %rd<4>;
.shared .align 8 .b8 smem[8];
ld.param.u64 %rd0, [out];
mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r0, 0; mov.u32 %r6, 0;
setp.ne.u32 %p0, %r1, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r2], 256;
READY:
bar.sync 0;
LOOP:
add.u32 %r6, %r6, %r1;
mbarrier.arrive.shared.b64 %rd2, [%r2];
WAIT:
mbarrier.try_wait.shared.b64 %p1, [%r2], %rd2;
@!%p1 bra WAIT;
add.u32 %r0, %r0, 1;
setp.lt.u32 %p2, %r0, {rounds};
@%p2 bra LOOP;
{_STORE}}}
"""

    def verify() -> None:
        np.testing.assert_array_equal(out, np.arange(256) * rounds)

    return Case("state_waits", "8 warps, waits as of cuda::barrier", text, 1, 256, 1, [out], verify)


def many_ctas(count: int) -> Case:
    """CTAs of one warp that store one word each: what a CTA costs."""
    out = np.zeros(count, np.uint32)
    text = f"""{_HEAD}{{
.reg .b32 %r<8>; .reg .b64 %rd<4>;
ld.param.u64 %rd0, [out];
mov.u32 %r1, %ctaid.x; mov.u32 %r6, %r1;
{_STORE}}}
"""

    def verify() -> None:
        np.testing.assert_array_equal(out, np.arange(count))

    return Case("many_ctas", "CTAs of one warp and one store", text, count, 32, 1, [out], verify)
