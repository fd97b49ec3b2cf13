"""tcgen05.mma: every kind, data path, operand source, major-ness and swizzle; limits and misuse."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tensor_cores import mma_run
from tests.tensor_cores import tensor_core_run as run
from tests.tensor_cores.mma_run import Case, multiply, read_d

from ptxemu.descriptors import InstructionDescriptor, ZeroColumnMask
from ptxemu.errors import ExecutionError, IllegalInstructionError, UnsupportedInstructionError
from ptxemu.numerics import dot
from ptxemu.sched.policy import Policy

pytestmark = pytest.mark.usefixtures("core")
K = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}


def check(case: Case, *, steps: int = 1, seed: int = 0, **options: Any) -> run.Recorder:
    """Small random integers give the exact product."""
    rng = np.random.default_rng(seed)
    a = run.integers(rng, (case.m, steps * K[case.atype]))
    b = run.integers(rng, (case.n, steps * K[case.btype]))
    if case.btype == "u8":
        b = abs(b)
    recorder = multiply(
        case, run.codes(a, case.atype), run.codes(b, case.btype), steps=steps, **options
    )
    assert np.array_equal(read_d(recorder, case), a @ b.T)
    assert recorder.complaints == []
    return recorder


@pytest.mark.parametrize("mode", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("majors", ["K K", "K MN", "MN K", "MN MN"])
def test_every_major_and_swizzle(mode: str, majors: str) -> None:
    a_major, b_major = majors.split()
    steps = {"32B": 1, "64B": 2}.get(mode, 4)
    case = Case(128, 64, a_mode=mode, b_mode=mode, a_major=a_major, b_major=b_major)
    check(case, steps=steps)


def test_machine_code_does_what_it_knows(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_numpy: list[int] = []
    product = dot.product
    monkeypatch.setattr(dot, "product", lambda a, b: (by_numpy.append(1), product(a, b))[1])
    check(Case(128, 64))
    check(Case(128, 64, a_in_tmem=True))
    assert len(by_numpy) == (0 if "machine code" in request.node.name else 2)


@pytest.mark.parametrize("in_tmem", [False, True])
@pytest.mark.parametrize(
    ("m", "group", "ws"),
    [
        (64, 1, False),
        (128, 1, False),
        (128, 2, False),
        (256, 2, False),
        (32, 1, True),
        (64, 1, True),
        (128, 1, True),
    ],
)
def test_every_data_path(m: int, group: int, ws: bool, in_tmem: bool) -> None:
    check(Case(m, 64, group=group, ws=ws, a_in_tmem=in_tmem), steps=2)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("n", [16, 48, 128, 256])
def test_every_n(n: int, group: int) -> None:
    check(Case(128 * group, n, group=group, a_in_tmem=False), steps=2)


@pytest.mark.parametrize("in_tmem", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "atype", "btype"),
    [
        ("f16", "f32", "f16", "f16"),
        ("f16", "f16", "f16", "f16"),
        ("f16", "f32", "f16", "bf16"),
        ("tf32", "f32", "tf32", "tf32"),
        ("f8f6f4", "f32", "e4m3", "e4m3"),
        ("f8f6f4", "f16", "e5m2", "e4m3"),
        ("i8", "s32", "s8", "s8"),
        ("i8", "s32", "s8", "u8"),
    ],
)
@pytest.mark.parametrize("group", [1, 2])
def test_every_type(
    kind: str, dtype: str, atype: str, btype: str, in_tmem: bool, group: int
) -> None:
    case = Case(128, 32, kind, dtype, atype, btype, group, a_in_tmem=in_tmem)
    check(case, steps=2)


def test_upper_half_of_the_lanes_for_m_64() -> None:
    shifted = {"d_address": 16 << 16, "a_address": 16 << 16 | 300}
    for in_tmem in (False, True):
        check(Case(64, 32, a_in_tmem=in_tmem, **shifted), steps=2)


@pytest.mark.parametrize("major", ["K", "MN"])
def test_tf32_with_32_byte_atoms(major: str) -> None:
    mode = "128B_atom_32B"
    types = ("tf32", "f32", "tf32", "tf32")
    check(Case(128, 64, *types, b_major=major, b_mode=mode if major == "MN" else "128B"), steps=2)


def test_mn_major_fp8() -> None:
    case = Case(128, 64, "f8f6f4", "f32", "e4m3", "e5m2", a_major="MN", b_major="MN")
    check(case, steps=2)


def test_negation_and_accumulation() -> None:
    rng = np.random.default_rng(5)
    a, b = run.integers(rng, (128, 16)), run.integers(rng, (16, 16))
    for negate_a, negate_b in ((False, False), (True, False), (False, True), (True, True)):
        case = Case(128, 16, negate_a=negate_a, negate_b=negate_b, accumulate_first=True)
        recorder = multiply(
            case, run.bf16(a), run.bf16(b), setup=lambda cta: mma_run.write_d(cta, 3.0)
        )
        sign = -1 if negate_a != negate_b else 1
        assert np.array_equal(read_d(recorder, case), 3 + sign * (a @ b.T))


def test_scale_input_d_divides_the_accumulator_by_a_power_of_two() -> None:
    case = Case(128, 16, accumulate_first=True, tail=", 3")
    recorder = multiply(
        case,
        run.bf16(np.ones((128, 16))),
        run.bf16(np.ones((16, 16))),
        setup=lambda cta: mma_run.write_d(cta, 40.0),
    )
    assert set(read_d(recorder, case).flat) == {40 / 8 + 16}


@pytest.mark.parametrize("group", [1, 2])
def test_disabled_lanes_keep_their_values(group: int) -> None:
    words = [0x0000000F, 0, 0, 0x80000000, 0, 0xFFFFFFFF, 0, 0][: 4 * group]
    registers = ", ".join(f"%q{i}" for i in range(len(words)))
    extra = f".reg .b32 %q<{len(words)}>;" + "".join(
        f"mov.b32 %q{i}, {word};" for i, word in enumerate(words)
    )
    case = Case(128 * group, 16, group=group, before_enable=f", {{{registers}}}")
    recorder = multiply(
        case,
        run.bf16(np.ones((128 * group, 16))),
        run.bf16(np.ones((16, 16))),
        setup=lambda cta: mma_run.write_d(cta, 5.0),
        extra=extra,
    )
    bits = np.array([words[lane // 32] >> lane % 32 & 1 for lane in range(128 * group)])
    assert np.array_equal(read_d(recorder, case)[:, 0], np.where(bits, 5.0, 16.0))
    writes = [a for a in recorder.accesses if a.space.value == "tmem" and a.kind.value == "write"]
    written = {(a.owner, int(s) // 2048) for a in writes for s in a.starts if a.size == 64}
    assert written == {divmod(int(lane), 128) for lane in np.flatnonzero(bits == 0)}


def test_integers_saturate_or_wrap_around() -> None:
    full = np.full((128, 32), 127, np.uint8)
    for saturate, expected in ((True, 2**31 - 1), (False, 2**31 - 1 + 32 * 127**2 - 2**32)):
        case = Case(128, 16, "i8", "s32", "s8", "s8", saturate=saturate, accumulate_first=True)
        recorder = multiply(
            case, full, full[:16], setup=lambda cta: mma_run.write_d(cta, 2**31 - 1, "s32")
        )
        assert set(read_d(recorder, case).flat) == {expected}


def test_random_data_agree_with_float64() -> None:
    rng = np.random.default_rng(6)
    a, b = run.random_bf16(rng, (256, 64)), run.random_bf16(rng, (128, 64))
    case = Case(256, 128, group=2)
    recorder = multiply(case, a, b, steps=4)
    exact = run.from_bf16(a) @ run.from_bf16(b).T
    scale = np.abs(run.from_bf16(a)) @ np.abs(run.from_bf16(b)).T
    assert np.max(np.abs(read_d(recorder, case) - exact) / scale) < 4 * 2.0**-24


def _padded(codes_: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """16 elements at the start of every 16 bytes, the rest 0xAA."""
    lines = codes_.reshape(-1, 16)
    flat = np.unpackbits(lines[:, :, None], axis=2, bitorder="little", count=bits)
    packed = np.packbits(flat.reshape(len(lines), -1), axis=1, bitorder="little")
    filler = np.full((len(lines), 16 - packed.shape[1]), 0xAA, np.uint8)
    return np.concatenate([packed, filler], axis=1).reshape(codes_.shape)


@pytest.mark.parametrize("in_tmem", [False, True])
@pytest.mark.parametrize("atype", ["e2m1", "e2m3", "e3m2"])
def test_narrow_types_of_f8f6f4(atype: str, in_tmem: bool) -> None:
    rng = np.random.default_rng(7)
    a, b = run.integers(rng, (128, 32), 3), run.integers(rng, (32, 32), 3)
    case = Case(128, 32, "f8f6f4", "f32", atype, "e2m3", a_in_tmem=in_tmem)
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}
    a_codes, b_codes = run.codes(a, atype), run.codes(b, "e2m3")
    stored = a_codes << 2 if atype == "e2m1" else a_codes
    recorder = multiply(
        case, stored if in_tmem else _padded(a_codes, bits[atype]), _padded(b_codes, 6)
    )
    assert np.array_equal(read_d(recorder, case), a @ b.T)


def test_zero_column_mask_of_ws() -> None:
    mask = ZeroColumnMask(is_nonzero=True, skip_span=3, use_span=4, first_span=(True, False) * 2)
    extra = f"mov.b64 %rd3, {mask.encode()};"
    rng = np.random.default_rng(8)
    a, b = run.integers(rng, (64, 16)), run.integers(rng, (64, 16))
    case = Case(64, 64, ws=True, tail=", %rd3")
    recorder = multiply(case, run.bf16(a), run.bf16(b), extra=extra)
    zero = np.arange(32) % 7
    kept = np.concatenate([zero >= 3, zero < 4])
    assert np.array_equal(read_d(recorder, case), a @ b.T * kept)


def test_column_shift_of_ws_takes_b_from_a_later_column() -> None:
    extra = f"mov.b64 %rd3, {ZeroColumnMask(column_shift=8).encode()};"
    rng = np.random.default_rng(9)
    a, b = run.integers(rng, (128, 16)), run.integers(rng, (128, 16))
    case = Case(128, 64, ws=True, tail=", %rd3")
    recorder = multiply(case, run.bf16(a), run.bf16(b), extra=extra)
    assert np.array_equal(read_d(recorder, case), a @ b[8:72].T)


def test_ws_multiplies_the_a_that_each_group_of_lanes_holds() -> None:
    rng = np.random.default_rng(10)
    a, b = run.integers(rng, (2, 64, 16)), run.integers(rng, (64, 16))
    case = Case(64, 64, ws=True, a_in_tmem=True)

    def fill(cta: Any) -> None:
        cta.tmem[:64, 256:264] = run.bf16(a[0]).view(np.uint32)
        cta.tmem[64:, 256:264] = run.bf16(a[1]).view(np.uint32)

    case_fill, mma_run.fill_a_tmem = mma_run.fill_a_tmem, lambda cta, *_: fill(cta)
    try:
        recorder = multiply(case, run.bf16(a[0]), run.bf16(b))
    finally:
        mma_run.fill_a_tmem = case_fill
    d = read_d(recorder, case)
    assert np.array_equal(d[:, :32], a[0] @ b[:32].T)
    assert np.array_equal(d[:, 32:], a[1] @ b[32:].T)


def issue(
    idesc: int = Case(128, 16).descriptor.encode(),
    desc: int = mma_run.desc(run.Placed(run.DATA, 16, 1024, "128B", 0)),
    suffix: str = "",
) -> str:
    """A product of the matrix at the beginning of shared memory with itself."""
    return f"""mov.b32 %r6, 0; mov.b32 %r7, {idesc}; mov.b64 %rd0, {desc}; mov.pred %p3, 0;
      tcgen05.mma.cta_group::1.kind::f16{suffix} [%r6], %rd0, %rd0, %r7, %p3;"""


def ones(cta: Any) -> None:
    cta.shared[run.DATA :].view(np.uint16)[:] = run.bf16(np.ones(1))[0]


@pytest.mark.parametrize("collector", ["a::fill", "a::use", "a::lastuse", "a::discard"])
def test_collector_hints_change_nothing(collector: str) -> None:
    text = mma_run.program(issue(suffix=f".collector::{collector}"))
    assert run.launch(text, fill=ones).ctas[0].tmem[0, 0].view(np.float32) == 16.0


def test_products_report_what_they_read_and_write() -> None:
    recorder = check(Case(128, 32, a_mode="32B", b_mode="32B"))
    by_async = [a for a in recorder.accesses if a.proxy.value == "async"]
    shared = [a for a in by_async if a.space.value == "shared"]
    covered = {int(s) + i for a in shared for s in a.starts for i in range(a.size)}
    a_bytes = range(mma_run.A_AT, mma_run.A_AT + 128 * 32)
    b_bytes = range(mma_run.B_AT, mma_run.B_AT + 32 * 32)
    assert covered == {*a_bytes, *b_bytes}
    (tmem,) = [a for a in by_async if a.space.value == "tmem"]
    assert (tmem.kind.value, tmem.size) == ("write", 32 * 4)
    assert tmem.starts.tolist() == [lane * 2048 for lane in range(128)]
    mma = next(op for op in recorder.issued if op.kind == "tcgen05.mma")
    assert tmem.agent is mma
    assert mma.shape == (128, 32, 16)


@pytest.mark.parametrize(
    ("case", "match"),
    [
        (Case(128, 24, group=2), "N from 16 to 256 in steps of 16; got 24"),
        (Case(256, 16), "M = 64 or 128; got 256"),
        (Case(64, 32, group=2), "M = 128 or 256; got 64"),
        (Case(64, 32, ws=True), "N = 64, 128 or 256; got 32"),
        (Case(128, 40, "i8", "s32", "s8", "s8"), "steps of 16; got 40"),
        (Case(128, 48, "i8", "s32", "s8", "s8", 2), "steps of 32; got 48"),
        (Case(128, 24, "f8f6f4", "f32", "e4m3", "e4m3", b_major="MN"), "transposed 8-bit B"),
        (Case(128, 32, "i8", "s32", "s8", "s8", negate_a=True), "no negation"),
        (Case(128, 32, "f8f6f4", "f32", "e2m1", "e4m3", a_major="MN"), "cannot be transposed"),
        (Case(128, 32, a_in_tmem=True, a_major="MN"), "A in TMEM cannot be transposed"),
        (Case(128, 32, "f16", "f16", "bf16", "bf16"), "needs A and B of type f16"),
        (Case(128, 32, d_address=16 << 16), "layout D needs a lane alignment of 0"),
        (Case(64, 32, a_in_tmem=True, d_address=16 << 16), "lane alignments 0 and 16"),
        (Case(128, 32, b_major="MN", b_mode="128B_atom_32B"), "32B atomicity is for tf32"),
        (Case(128, 32, d_address=500), "beyond the last one, 511"),
    ],
)
def test_limits_of_the_isa_are_errors_that_name_the_section(case: Case, match: str) -> None:
    k = K.get(case.atype, 32)
    a = np.zeros((case.m, k), run.codes(np.zeros(1), case.atype).dtype)
    b = np.zeros((case.n, k), run.codes(np.zeros(1), case.btype).dtype)
    with pytest.raises(ExecutionError, match=match) as caught:
        multiply(case, a, b)
    if "511" not in match:
        assert "PTX ISA" in str(caught.value)


SPARSE = InstructionDescriptor("f16", 128, 16, "f32", "f16", "f16", sparsity=True).encode()
OF_TF32 = InstructionDescriptor("tf32", 128, 16, "f32", "tf32", "tf32").encode()
NO_COLUMNS = Case(128, 16).descriptor.encode() & ~(63 << 17)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (issue(SPARSE), "sparse"),
        (issue(OF_TF32), "atype of .kind::f16"),
        (issue(NO_COLUMNS), "steps of 8"),
        (issue(desc=3 << 61 | 1 << 46), "swizzling mode"),
    ],
)
def test_wrong_descriptors_are_refused(text: str, match: str) -> None:
    with pytest.raises(ExecutionError, match=match):
        run.launch(mma_run.program(text))


def test_wrong_fixed_bits_of_a_descriptor_are_reported() -> None:
    text = mma_run.program(
        issue(desc=mma_run.desc(run.Placed(run.DATA, 16, 1024, "128B", 0)) & ~(1 << 46))
    )
    assert run.launch(text).codes == ["invalid-descriptor"] * 2


ILLEGAL, UNSUPPORTED = IllegalInstructionError, UnsupportedInstructionError


@pytest.mark.parametrize(
    ("kind", "operands", "error", "match"),
    [
        ("mxf4nvf4.block_scale", "[%r6], [%r6], %p3", UNSUPPORTED, "block16 or .block32"),
        ("f16.block_scale", "[%r6], [%r6], %p3", UNSUPPORTED, "no .block_scale"),
        ("f16", "{%r6, %r6}, %p3", ILLEGAL, "disable-output-lane has 2"),
        ("f16", "%p3, 16", ILLEGAL, "must be 0 to 15"),
        ("i8", "%p3, 1", ILLEGAL, "scale-input-d"),
        ("f16.collector::b0::use", "%p3", UNSUPPORTED, "collector::b0::use"),
    ],
)
def test_what_the_isa_does_not_have_is_refused_at_load(
    kind: str, operands: str, error: type[Exception], match: str
) -> None:
    text = f"tcgen05.mma.cta_group::1.kind::{kind} [%r6], %rd0, %rd0, %r7, {operands};"
    with pytest.raises(error, match=match):
        run.launch(mma_run.program(text))


def test_many_threads_that_issue_are_a_warning() -> None:
    text = mma_run.program(issue()).replace("[%r1], 1;", "[%r1], 2;")
    text = text.replace("@!%p1 bra SKIP;", "setp.lt.u32 %p1, %r2, 2; @!%p1 bra SKIP;")
    recorder = run.launch(text, fill=ones)
    assert recorder.complaints[0][:2] == ("warning", "tcgen05-issued-by-many")


@pytest.mark.parametrize("asynchronous", ["eager", "late", "random"])
def test_a_chain_on_one_accumulator_is_ordered(asynchronous: str) -> None:
    for seed in range(3):
        policy = Policy(asynchronous=asynchronous, seed=seed)
        recorder = check(Case(128, 32), steps=4, seed=seed, policy=policy)
        chain = [op for op in recorder.issued if op.kind == "tcgen05.mma"]
        for earlier, later in itertools.pairwise(chain):
            assert later.ordering.after == [earlier]
        commit = next(op for op in recorder.issued if op.kind == "tcgen05.commit")
        assert commit.ordering.after == chain
