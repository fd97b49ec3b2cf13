"""tcgen05.ld, st and wait: every shape and size, lanes of a warp, and when values arrive."""

from typing import Any

import numpy as np
import pytest
from tests.tensor_cores import tensor_core_run as run

from ptxemu.errors import ExecutionError, IllegalInstructionError, UnsupportedInstructionError
from ptxemu.sched.policy import Policy

PER_REPEAT = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
LATE = Policy(asynchronous="late", warps="round_robin")


def program(body: str, registers: int) -> str:
    """`body` runs in every warp; %t is a TMEM address in the warp's own lanes."""
    return f"""
.visible .entry k()
{{
  .reg .b32 %r<8>; .reg .b32 %v<{registers}>; .reg .b32 %w<{registers}>; .reg .b32 %t;
  .reg .pred %p<2>; .shared .align 4 .b32 hold; mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5;
  setp.ne.u32 %p0, %r1, 0; mov.u32 %r2, hold; @%p0 bra READY;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 512;
READY: bar.sync 0; ld.shared.u32 %t, [%r2]; shl.b32 %r3, %r1, 21; add.u32 %t, %t, %r3;
  {body}
  bar.sync 0; @%p0 bra DONE; ld.shared.u32 %t, [%r2];
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 512;
DONE: ret;
}}
"""


def names(prefix: str, count: int) -> str:
    """A vector of registers."""
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def numbered(cta: Any) -> None:
    """Every cell holds its own number."""
    cta.tmem[:] = np.arange(128 * 512, dtype=np.uint32).reshape(128, 512)


def registers_of(warp: Any, prefix: str, count: int) -> Any:
    """Values (count, 32)."""
    slots = {r.name: r.slot for r in warp.program.function.registers}
    return np.stack([warp.registers[slots[f"%{prefix}{i}"]] for i in range(count)])


def figure(shape: str, thread: int, register: int) -> tuple[int, int]:
    """Lane and column of a register, as the ISA's figures draw them."""
    if shape == "32x32b":
        return thread, register
    if shape == "16x32bx2":
        return thread % 16, register
    if shape == "16x64b":
        return thread // 4 + (8 if thread % 2 else 0), 2 * register + (thread % 4) // 2
    repeat, within = divmod(register, PER_REPEAT[shape])
    if shape == "16x128b":
        return thread // 4 + 8 * within, 4 * repeat + thread % 4
    return thread // 4 + 8 * (within // 2), 8 * repeat + 2 * (thread % 4) + within % 2


CASES = [
    (shape, repeat)
    for shape, per_repeat in PER_REPEAT.items()
    for repeat in (1, 2, 4, 8, 16, 32, 64, 128)
    if per_repeat * repeat <= 128
]


@pytest.mark.parametrize(("shape", "repeat"), CASES)
def test_loads_of_every_shape_and_size(shape: str, repeat: int) -> None:
    count = PER_REPEAT[shape] * repeat
    split = ", 200" if shape == "16x32bx2" else ""
    body = f"""add.u32 %t, %t, 32;
      tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {names("v", count)}, [%t]{split};
      tcgen05.wait::ld.sync.aligned;"""
    recorder = run.launch(program(body, count), warps=4, fill=numbered)
    for warp in recorder.ctas[0].warps:
        values = registers_of(warp, "v", count)
        for thread in range(32):
            for register in range(0, count, max(1, count // 8)):
                lane, column = figure(shape, thread, register)
                offset = 200 if shape == "16x32bx2" and thread >= 16 else 0
                expected = (32 * warp.index + lane) * 512 + 32 + column + offset
                assert values[register, thread] == expected, (thread, register)
    assert recorder.complaints == []


@pytest.mark.parametrize(("shape", "repeat"), [c for c in CASES if c[1] in (1, 8)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_stores_are_the_inverse_of_loads(shape: str, repeat: int, is_packed: bool) -> None:
    count = PER_REPEAT[shape] * repeat
    split = ", 200" if shape == "16x32bx2" else ""
    unpack, pack = (".unpack::16b", ".pack::16b") if is_packed else ("", "")
    fill = "".join(f"mad.lo.u32 %v{i}, %r0, 0x10001, {i << 17 | i << 8};" for i in range(count))
    body = f"""{fill}
      tcgen05.st.sync.aligned.{shape}.x{repeat}{unpack}.b32 [%t]{split}, {names("v", count)};
      tcgen05.wait::st.sync.aligned;
      tcgen05.ld.sync.aligned.{shape}.x{repeat}{pack}.b32 {names("w", count)}, [%t]{split};
      tcgen05.wait::ld.sync.aligned;"""
    recorder = run.launch(program(body, count), warps=4)
    for warp in recorder.ctas[0].warps:
        stored = registers_of(warp, "v", count)
        assert np.array_equal(stored, registers_of(warp, "w", count))
        thread, register = 21, count - 1
        lane, column = figure(shape, thread, register)
        column += 200 if shape == "16x32bx2" else 0
        cells = recorder.ctas[0].tmem[32 * warp.index + lane]
        value = stored[register, thread]
        if is_packed:
            first = 2 * (column - 200) + 200 if shape == "16x32bx2" else 2 * column
            assert (cells[first], cells[first + 1]) == (value & 0xFFFF, value >> 16)
        else:
            assert cells[column] == value


@pytest.mark.parametrize("pack", ["", ".pack::16b"])
@pytest.mark.parametrize("shape", PER_REPEAT)
def test_accesses_are_reported_as_lanes_and_columns(shape: str, pack: str) -> None:
    count, split = 2 * PER_REPEAT[shape], ", 200" if shape == "16x32bx2" else ""
    body = f"""tcgen05.ld.sync.aligned.{shape}.x2{pack}.b32 {names("v", count)}, [%t]{split};
      tcgen05.wait::ld.sync.aligned;"""
    recorder = run.launch(program(body, count), warps=2)
    reads = [a for a in recorder.accesses if a.space.value == "tmem" and a.kind.value == "read"]
    assert {a.proxy.value for a in reads} == {"generic"}
    joined = [operation for operation, _ in recorder.joined]
    assert all(a.agent in joined for a in reads)
    found = {
        divmod(int(s) // 4 + k, 512) for a in reads for s in a.starts for k in range(a.size // 4)
    }
    expected = set()
    for warp, thread, register in np.ndindex(2, 32, count):
        lane, column = figure(shape, thread, register)
        first = 200 if split and thread >= 16 else 0
        columns = (2 * column, 2 * column + 1) if pack else (column,)
        expected |= {(32 * warp + lane, first + c) for c in columns}
    assert found == expected


LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%t];"


def test_a_late_load_gives_its_value_to_whoever_depends_on_it() -> None:
    """As on hardware (PTX ISA, "Register dependencies, same thread"), though it is reported."""
    store = "mov.u32 %r4, smem; st.shared.u32 [%r4], %v0;"
    keep = "shfl.sync.bfly.b32 %v1, %v1, 0, 31, -1;"  # else the block keeps %v1 to itself
    body = f"{LOAD} add.u32 %v1, %v0, 1; {keep} {LOAD} {store} tcgen05.wait::ld.sync.aligned;"
    recorder = run.launch(program(body, 2), warps=1, fill=numbered, policy=LATE)
    warp = recorder.ctas[0].warps[0]
    assert registers_of(warp, "v", 2)[1].tolist() == [512 * lane + 1 for lane in range(32)]
    assert recorder.ctas[0].shared[run.DATA :].view(np.uint32)[0] == 31 * 512
    assert [code for _, code, _ in recorder.complaints] == ["tmem-load-used-early"] * 2


STORE_OF = "st.shared.u32 [%r4], {0};"


@pytest.mark.parametrize(
    ("body", "touched", "used"),
    [
        (f"{LOAD} {STORE_OF.format('%v0')}", 1, 1),
        (f"{LOAD} add.u32 %v1, %v0, 1; mul.lo.u32 %v2, %v1, 3; {STORE_OF.format('%v2')}", 1, 1),
        (f"{LOAD} add.u32 %v1, %v0, 1; setp.eq.u32 %p1, %v1, 0; @%p1 bra HERE; HERE:", 1, 1),
        (f"{LOAD} setp.eq.u32 %p1, %v0, 0; @!%p1 {STORE_OF.format('%r3')}", 1, 1),
        (
            f"{LOAD} {LOAD.replace('v0', 'v1')} add.u32 %v2, %v0, %v1; {STORE_OF.format('%v2')}",
            2,
            2,
        ),
        (f"{LOAD} add.u32 %v1, %v0, 1; mov.u32 %v1, 5; {STORE_OF.format('%v1')}", 1, 0),
        (f"{LOAD} mov.b32 %v1, %v0; add.u32 %v2, %v1, 1;", 1, 0),
        (f"{LOAD} {LOAD}", 0, 0),
    ],
)
def test_registers_are_used_by_what_cannot_go_on_without_them(
    body: str, touched: int, used: int
) -> None:
    """Hardware executes pure instructions whenever it likes: they hold nothing back."""
    keep = "shfl.sync.bfly.b32 %r5, %r5, 0, 31, -1;"  # so that the body is more than one block
    text = program(f"mov.u32 %r4, smem; {keep} {body} {keep} tcgen05.wait::ld.sync.aligned;", 3)
    recorder = run.launch(text, warps=1, fill=numbered, policy=LATE)
    loads = [operation for operation in recorder.issued if operation.kind == "tcgen05.ld"]
    assert (len(recorder.touched), len(recorder.used)) == (touched, used)
    assert set(recorder.used) <= set(recorder.touched) <= set(loads)
    joined = {operation for operation, _ in recorder.joined}
    assert joined == set(loads)  # the wait is for all of them, used or not


def test_a_late_load_reads_late() -> None:
    """Without tcgen05.wait::ld the store behind the load may come first."""
    store = "mov.b32 %w0, 7; tcgen05.st.sync.aligned.32x32b.x1.b32 [%t], {%w0};"
    racy = program(f"{LOAD} {store} tcgen05.wait::st.sync.aligned;", 1)
    seen = set()
    for seed in range(20):
        recorder = run.launch(racy, fill=numbered, policy=Policy(seed=seed, asynchronous="late"))
        seen.add(int(registers_of(recorder.ctas[0].warps[0], "v", 1)[0, 3]))
    assert seen == {3 * 512, 7}
    ordered = program(f"{LOAD} tcgen05.wait::ld.sync.aligned; {store}", 1)
    for seed in range(20):
        recorder = run.launch(ordered, fill=numbered, policy=Policy(seed=seed, asynchronous="late"))
        assert registers_of(recorder.ctas[0].warps[0], "v", 1)[0, 3] == 3 * 512


def test_two_loads_into_the_same_register_keep_their_order() -> None:
    other = LOAD.replace("[%t]", "[%t+5]")
    for seed in range(10):
        text = program(f"{LOAD} {other} tcgen05.wait::ld.sync.aligned;", 1)
        recorder = run.launch(text, fill=numbered, policy=Policy(seed=seed, asynchronous="late"))
        assert registers_of(recorder.ctas[0].warps[0], "v", 1)[0, 3] == 3 * 512 + 5


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (f"add.u32 %t, %t, 0x100000; {LOAD}", "lane 16 and the shape 32 lanes"),
        (f"add.u32 %t, %t, 512; {LOAD}", "beyond the last one, 511"),
        (f"add.u32 %t, %t, %r0; {LOAD}", "taddr is not the same in all threads"),
    ],
)
def test_addresses_that_a_warp_may_not_use_are_errors(body: str, match: str) -> None:
    with pytest.raises(ExecutionError, match=match):
        run.launch(program(body, 1))


@pytest.mark.parametrize(("lane", "level"), [(0, "warning"), (64, "error")])
def test_lanes_of_another_warp_are_reported_and_become_the_own_ones(lane: int, level: str) -> None:
    body = f"mov.b32 %t, {lane << 16}; {LOAD} tcgen05.wait::ld.sync.aligned;"
    recorder = run.launch(program(body, 1), warps=2, fill=numbered)
    assert registers_of(recorder.ctas[0].warps[1], "v", 1)[0, 5] == 37 * 512
    expected = [level] * (1 if lane == 0 else 2)
    assert [(a, b) for a, b, _ in recorder.complaints] == [(e, "tmem-lanes") for e in expected]
    assert "lanes 32 to 63; the address has lane" in recorder.complaints[-1][2] or lane == 64


def test_upper_16_lanes_are_allowed_for_shapes_of_16() -> None:
    body = """add.u32 %t, %t, 0x100000;
      tcgen05.ld.sync.aligned.16x64b.x1.b32 {%v0}, [%t]; tcgen05.wait::ld.sync.aligned;"""
    recorder = run.launch(program(body, 1), fill=numbered)
    assert registers_of(recorder.ctas[0].warps[0], "v", 1)[0, 0] == 16 * 512


ILLEGAL, UNSUPPORTED = IllegalInstructionError, UnsupportedInstructionError


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("ld.sync.aligned.16x256b.x64.b32 {%v0}, [%t]", ILLEGAL, "x64"),
        ("ld.sync.aligned.32x32b.x2.b32 {%v0}, [%t]", ILLEGAL, "expected 2 registers; got 1"),
        ("ld.sync.aligned.32x32b.x1.b32 {%v0}, [%t], 3", ILLEGAL, "immHalfSplitoff"),
        ("ld.red.sync.aligned.32x32b.x2.min.u32 {%v0}, [%t]", UNSUPPORTED, "red"),
        ("ld.sync.aligned.32x32b.x1.unpack::16b.b32 {%v0}, [%t]", UNSUPPORTED, "unpack::16b"),
    ],
)
def test_what_the_isa_does_not_have_is_refused_at_load(
    text: str, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        run.launch(program(f"tcgen05.{text};", 1))
