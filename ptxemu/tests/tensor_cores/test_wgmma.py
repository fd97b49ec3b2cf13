"""wgmma: every type, operand source, major-ness and swizzle; groups; and misuse of registers."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tensor_cores import tensor_core_run as run

from ptxemu.descriptors import Swizzle, WgmmaDescriptor
from ptxemu.engines import wgmma as engine
from ptxemu.errors import ExecutionError, IllegalInstructionError
from ptxemu.numerics import dot
from ptxemu.sched.policy import Policy

pytestmark = pytest.mark.usefixtures("core")
A_AT, B_AT = run.DATA, run.DATA + 64 * 1024
MODES = {"none": Swizzle.NONE, "32B": Swizzle.B32, "64B": Swizzle.B64, "128B": Swizzle.B128}
K = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}


def program(
    n: int = 8,
    dtype: str = "f32",
    atype: str = "bf16",
    btype: str = "bf16",
    *,
    a_in_registers: bool = False,
    immediates: str = ", 1, 1, 0, 0",
    behind: str = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
    fence: str = "wgmma.fence.sync.aligned;",
) -> str:
    """One wgmma.mma_async with its descriptors and scale-d as parameters."""
    count = n // 4 if dtype == "f16" else n // 2
    d = ", ".join(f"%d{i}" for i in range(count))
    a = "{%a0, %a1, %a2, %a3}" if a_in_registers else "%rd0"
    return f"""
.visible .entry k(.param .u64 a, .param .u64 b, .param .u32 scale)
{{
  .reg .b32 %d<{count}>; .reg .b32 %a<4>; .reg .b32 %r<2>; .reg .b64 %rd<2>; .reg .pred %p;
  ld.param.u64 %rd0, [a]; ld.param.u64 %rd1, [b]; ld.param.u32 %r0, [scale];
  setp.ne.u32 %p, %r0, 0;
  {fence}
  wgmma.mma_async.sync.aligned.m64n{n}k{K[atype]}.{dtype}.{atype}.{btype}
      {{{d}}}, {a}, %rd1, %p{immediates};
  {behind}
  ret;
}}
"""


def fragment_of_d(row: int, column: int) -> tuple[int, int, int]:
    """Warp, lane and number of the value that holds D[row, column]: the figure "WGMMA D matrix
    fragment": a quad of lanes holds 8 columns, a register pair rows 8 apart."""
    warp, row = divmod(row, 16)
    lane = 4 * (row % 8) + column % 8 // 2
    return warp, lane, 4 * (column // 8) + 2 * (row // 8) + column % 2


def slots(warp: Any, prefix: str) -> list[int]:
    """Slots of the registers %<prefix>0, %<prefix>1..."""
    names = {r.name: r.slot for r in warp.program.function.registers}
    found = [names[f"%{prefix}{i}"] for i in range(len(names)) if f"%{prefix}{i}" in names]
    return found


def read_d(recorder: run.Recorder, n: int) -> NDArray[Any]:
    """D (64, n) of f32 from the registers of the four warps."""
    warps = recorder.ctas[0].warps
    values = [np.stack([w.registers[slot] for slot in slots(w, "d")]) for w in warps]
    result = np.zeros((64, n), np.float32)
    for row in range(64):
        for column in range(n):
            warp, lane, value = fragment_of_d(row, column)
            result[row, column] = values[warp].view(np.float32)[value, lane]
    return result


def multiply(
    a: NDArray[Any],
    b: NDArray[Any],
    text: str,
    *,
    mode: str = "128B",
    d: float = 0.0,
    policy: Policy | None = None,
) -> run.Recorder:
    """Run a program on A (64, k) and B (n, k) of whole-byte element types."""

    def fill(cta: Any) -> None:
        run.place(cta.shared, a, A_AT, mode, "K")
        run.place(cta.shared, b, B_AT, mode, "K")
        for warp in cta.warps:
            for slot in slots(warp, "d"):
                warp.registers[slot] = np.full(32, d, np.float32).view(np.uint32)
            _fill_a(warp, a)

    probe = np.zeros(256 * 1024, np.uint8)
    descriptors = []
    for matrix, at in ((a, A_AT), (b, B_AT)):
        where = run.place(probe, matrix, at, mode, "K")
        descriptors.append(
            WgmmaDescriptor(where.start, where.leading, where.stride, MODES[mode]).encode()
        )
    return run.launch(
        text, args=(*descriptors, 0), target="sm_90a", warps=4, fill=fill, policy=policy
    )


def _fill_a(warp: Any, a: NDArray[Any]) -> None:
    """A's registers: the figure "WGMMA .m64nNk16 register fragment for matrix A" and its like."""
    registers = slots(warp, "a")
    if not registers:
        return
    per_register = 4 // a.dtype.itemsize
    for number, slot in enumerate(registers):
        words = np.zeros((32, per_register), a.dtype)
        for lane in range(32):
            row = 16 * warp.index + lane // 4 + 8 * (number % 2)
            first = per_register * (lane % 4 + 4 * (number // 2))
            words[lane] = a[row, first : first + per_register]
        warp.registers[slot] = words.view(np.uint32).reshape(32).copy()


def test_machine_code_does_what_it_knows(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_numpy: list[int] = []
    product = dot.product
    monkeypatch.setattr(dot, "product", lambda a, b: (by_numpy.append(1), product(a, b))[1])
    for atype in ("bf16", "f16"):
        text = program(32, "f32", atype, atype, immediates=", 1, 1, 0", a_in_registers=True)
        a, b = np.ones((64, 16)), np.ones((32, 16))
        recorder = multiply(run.codes(a, atype), run.codes(b, atype), text)
        assert np.array_equal(read_d(recorder, 32), a @ b.T)
    is_code = "machine code" in request.node.name
    assert len(by_numpy) == (0 if is_code else 8)


CHAIN = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{d}}}, %rd0, %rd1, %p, 1, 1, 0, 0;"


@pytest.mark.parametrize("asynchronous", ["eager", "late", "random"])
def test_products_on_the_same_d_accumulate_in_order(asynchronous: str) -> None:
    rng = np.random.default_rng(5)
    a, b = run.integers(rng, (64, 16)), run.integers(rng, (8, 16))
    d = ", ".join(f"%d{i}" for i in range(4))
    more = "mov.pred %p, -1;" + CHAIN.format(d=d) * 3
    behind = f"{more} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    text = program(behind=behind)
    for seed in range(3):
        policy = Policy(asynchronous=asynchronous, seed=seed)
        recorder = multiply(run.codes(a, "bf16"), run.codes(b, "bf16"), text, policy=policy, d=9.0)
        assert np.array_equal(read_d(recorder, 8), 4 * (a @ b.T))
        assert recorder.complaints == []
        of_a_warp = [op for op in recorder.issued if op.issuer.index == 2]
        for earlier, later in itertools.pairwise(of_a_warp):
            assert later.ordering.after == [earlier]


@pytest.mark.parametrize("asynchronous", ["eager", "late", "random"])
def test_a_fence_orders_products_of_other_shapes_on_some_of_the_same_d(asynchronous: str) -> None:
    rng = np.random.default_rng(6)
    a, b = run.integers(rng, (64, 16)), run.integers(rng, (16, 16))
    few, all_ = (", ".join(f"%d{i}" for i in range(count)) for count in (4, 8))
    more = "wgmma.fence.sync.aligned; mov.pred %p, -1;" + CHAIN.format(d=few)
    more += "wgmma.fence.sync.aligned;" + CHAIN.replace("m64n8", "m64n16").format(d=all_)
    behind = f"{more} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    text = program(16, behind=behind)
    expected = 2 * (a @ b.T)
    expected[:, :8] += (a @ b.T)[:, :8]
    for seed in range(4):
        policy = Policy(asynchronous=asynchronous, seed=seed)
        recorder = multiply(run.codes(a, "bf16"), run.codes(b, "bf16"), text, policy=policy, d=9.0)
        assert np.array_equal(read_d(recorder, 16), expected)
        assert recorder.complaints == []


# A visible instruction that names %r1 and changes nothing: registers that only one block names are
# not given back to the warp, where these tests look for it.
KEEP_R1 = "shfl.sync.bfly.b32 %r1, %r1, 0, 31, -1;"


def test_wait_group_leaves_the_latest_groups_pending() -> None:
    d = ", ".join(f"%d{i}" for i in range(4))
    e = ", ".join(f"%e{i}" for i in range(4))
    commit = "wgmma.commit_group.sync.aligned;"
    behind = (
        f".reg .b32 %e<4>; {commit} {CHAIN.format(d=e)} {commit}"
        f"wgmma.wait_group.sync.aligned 1; mov.b32 %r1, %d0; {KEEP_R1}"
        "wgmma.wait_group.sync.aligned 0;"
    )
    text = program(behind=behind)
    a, b = np.ones((64, 16)), np.ones((8, 16))
    late = Policy(asynchronous="late", warps="round_robin")
    recorder = multiply(run.bf16(a), run.bf16(b), text, policy=late)
    warp = recorder.ctas[0].warps[0]
    names = {r.name: r.slot for r in warp.program.function.registers}
    assert warp.registers[names["%r1"]].view(np.float32)[0] == 16.0
    # each of the four warps has waited for the products of all four
    joined = [op.registers[0] for op, _ in recorder.joined if op.issuer is warp]
    assert joined[0] == names["%d0"]
    assert sorted(joined) == sorted([names["%d0"], names["%e0"]] * 4)
    assert d and recorder.complaints == []


def test_a_wait_looks_at_each_product_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    is_complete = engine.is_complete
    monkeypatch.setattr(engine, "is_complete", lambda op: looked.append(op) or is_complete(op))
    count, warps = 24, 4
    more = CHAIN.format(d=", ".join(f"%d{i}" for i in range(4))) * (count - 1)
    behind = f"{more} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    text = program(behind=behind)
    ones = run.bf16(np.ones((64, 16)))
    recorder = multiply(ones, ones[:8], text, policy=Policy(asynchronous="late"), d=0.0)
    assert len(recorder.issued) == count * warps
    # Each once, and the last one again for the steps of the other warps' parts.
    assert count * warps <= len(looked) <= (count + warps) * warps


def test_late_products_are_not_seen_before_the_wait() -> None:
    commit_and_wait = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    behind = f"mov.b32 %r1, %d0; {KEEP_R1} {commit_and_wait}"
    text = program(behind=behind)
    late = Policy(asynchronous="late", warps="round_robin")
    ones = run.bf16(np.ones((64, 16)))
    recorder = multiply(ones, ones[:8], text, policy=late, d=5.0)
    warp = recorder.ctas[0].warps[0]
    names = {r.name: r.slot for r in warp.program.function.registers}
    assert warp.registers[names["%r1"]].view(np.float32)[0] == 5.0
    assert recorder.codes == ["wgmma-register-in-flight"] * 4
    level, _, message = recorder.complaints[0]
    assert level == "error"
    assert "%d0" in message and "needs wgmma.wait_group" in message


def test_a_must_not_be_written_while_the_product_reads_it() -> None:
    behind = "mov.b32 %a1, %r0; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    text = program(a_in_registers=True, immediates=", 1, 1, 0", behind=behind)
    ones = run.bf16(np.ones((64, 16)))
    assert multiply(ones, ones[:8], text).codes == ["wgmma-register-in-flight"] * 4


def test_reads_of_shared_memory_are_reported_as_async() -> None:
    ones = run.bf16(np.ones((64, 16)))
    recorder = multiply(ones, ones[:8], program(), mode="32B")
    reads = [a for a in recorder.accesses if a.proxy.value == "async"]
    assert {a.kind.value for a in reads} == {"read"}
    assert {a.space.value for a in reads} == {"shared"}
    covered = {int(s) + i for a in reads for s in a.starts for i in range(a.size)}
    assert covered == {*range(A_AT, A_AT + 64 * 32), *range(B_AT, B_AT + 8 * 32)}


def test_a_matrix_beyond_shared_memory_is_an_error() -> None:
    descriptor = WgmmaDescriptor(0x3FC00, 16, 1024, Swizzle.B128).encode()
    with pytest.raises(ExecutionError, match="beyond the CTA's"):
        run.launch(program(), args=(descriptor, descriptor, 0), target="sm_90a", warps=4)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (program(12), "no shape m64n12k16"),
        (program(40, "s32", "s8", "s8", immediates=""), "no shape m64n40k32"),
        (program(8, "f16"), "no .f16.bf16.bf16"),
        (program(immediates=", 2, 1, 0, 0"), "imm-scale"),
        (program(immediates=", 1, 1"), "immediates"),
    ],
)
def test_what_the_isa_does_not_have_is_refused_at_load(text: str, match: str) -> None:
    with pytest.raises(IllegalInstructionError, match=match):
        run.launch(text, args=(0, 0, 0), target="sm_90a", warps=4)
