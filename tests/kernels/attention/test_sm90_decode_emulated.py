"""The Hopper decode's compiled kernels on ptxemu: within the contract, without a finding.

Those of few heads are in test_sm90_few_heads_emulated.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa import reference
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.packed_rows import parts_of
from flashdsa.backends.sm90.sparse_mla import bind_decode
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE, Tile
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.full.plan import DecodePlan
from flashdsa.kernels.catalog import SPARSE_MLA_DECODE
from flashdsa.ops.attention import SparseMlaOperands, SparseMlaOutOperands
from flashdsa.row_formats import ROW_FORMATS
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward, judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from flashdsa.verify.tolerances import BIAS_TOLERANCE, F16_ROUNDING
from ptxemu import Policy
from tests.kernels.findings import EVERY_FEATURE
from tests.support.compilations import ptx_of

LATER = pytest.mark.slow
LATE = Policy(asynchronous="late")
TWO_STEPS = SparseMlaCase("two steps", 1, 90, 16, 180, duplicates=True, invalid=True, poison=True)
ALL_AT_ONCE = SparseMlaCase(
    "every feature", 3, 60, 40, 140, attn_sink="infinite", **EVERY_FEATURE | {"kv_3d": False}
)


def run(
    case: SparseMlaCase,
    size: int,
    policy: Policy | None = None,
    plan: DecodePlan | FewHeadsPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """O and lse by clusters of that size; they are judged, and nothing may be found.

    Args:
        plan: of the kernel; None: that of 64 heads.
    """
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    rows = inputs.kv.flatten(0, -2)
    operands = SparseMlaOperands(
        inputs.q, rows, inputs.indices.flatten(1), inputs.topk_length, inputs.attn_sink
    )
    scale = case.d_qk**-0.5 if case.sm_scale is None else case.sm_scale
    plan = plan or DecodePlan(packed=bool(case.packed), tile=Tile(case.d_qk))
    out, lse = launched(plan, operands, size, scale, policy)
    assert failures(judge_forward(inputs, out, lse, backend="emulate-sm90")) == []
    return out, lse


def launched(
    plan: DecodePlan | FewHeadsPlan,
    operands: SparseMlaOperands,
    size: int,
    scale: float,
    policy: Policy | None = None,
) -> tuple[Tensor, Tensor]:
    """O and lse; nothing may be found."""
    emulator = Emulator(policy=policy, on_finding="collect")
    rows = operands.q.shape[:2]
    out = emulator.empty(*rows, 512, dtype=torch.bfloat16)
    lse = emulator.empty(*rows, dtype=torch.float32)
    q, kv, indices, *others = operands
    with emulator.launching():
        write = bind_decode(emulator, plan, size, operands, scale)
        write(SparseMlaOutOperands(q, kv, indices, out, lse, None, *others))
    assert [str(finding) for finding in emulator.findings] == []
    return out, lse


def assert_near(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """O and lse as float64 has them."""
    assert (got[0].double() - expected[0]).norm() <= 2.5e-3 * expected[0].norm()
    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "plan", [DecodePlan(), pytest.param(FewHeadsPlan(), marks=pytest.mark.slow)], ids=["64", "16"]
)
def test_ctas_with_a_tile_share_a_short_item(plan: DecodePlan | FewHeadsPlan) -> None:
    """In clusters of four: no tile, one, two (one CTA takes them of 64 heads), three, five."""
    draw = torch.Generator().manual_seed(0)
    kv, q = torch.randn(90, 576, generator=draw), torch.randn(5, 5, 576, generator=draw).bfloat16()
    indices = torch.randint(-1, 90, (5, 300), generator=draw).int()
    lengths = torch.tensor([0, 60, 128, 190, 300], dtype=torch.int32)
    rows = flashdsa.quantize_kv(kv, scale="fp32") if plan.packed else kv.bfloat16()
    operands = SparseMlaOperands(q, rows, indices, lengths)
    values = reference.unpack_kv(rows) if plan.packed else rows
    expected = reference.sparse_mla_fwd(q, values, indices, topk_length=lengths)
    assert_near(launched(plan, operands, 4, 576**-0.5, LATE), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("packed", "sizes"), [("", (1, 16)), ("ue8m0", (1, 4))])
def test_clusters_of_any_size_give_the_same(packed: str, sizes: tuple[int, ...]) -> None:
    """With three tiles at most three CTAs have one; the others take no part."""
    case = replace(TWO_STEPS, packed=packed)
    when = ("late", "eager", "late")
    first_O, first_lse = run(case, sizes[0])
    for size, asynchronous in zip(sizes[1:], when, strict=False):
        O, lse = run(case, size, Policy(asynchronous=asynchronous, seed=3))
        # P is rounded against other maxima.
        assert (O.double() - first_O.double()).norm() <= 2e-3 * first_O.double().norm()
        torch.testing.assert_close(lse, first_lse, rtol=1e-6, atol=1e-6)


def pages_of(name: str, rows: Tensor, page_size: int) -> Tensor:
    """Packed rows (S_kv, row_bytes) in pages as servers have them, with NaN in the padding."""
    form, num_pages = ROW_FORMATS[name], -(-len(rows) // page_size)
    memory = torch.full((num_pages, -(-form.page_bytes(page_size) // 16) * 16 + 32), 0xFF).byte()
    pages = memory[:, : page_size * form.row_bytes].unflatten(1, (page_size, form.row_bytes))
    slots = torch.arange(len(rows))
    for part, whole in zip(parts_of(pages, form), parts_of(rows[:, None], form), strict=True):
        part[slots // page_size, slots % page_size] = whole[:, 0]
    return pages


@pytest.mark.parametrize(
    ("name", "size", "page_size"),
    [
        ("v4", 2, 24),  # a row's page is found by a division
        *(
            pytest.param(*x, 32, marks=LATER)
            for x in (("v32_no_rope", 3), ("v41", 1), ("v41_fp4", 2), ("v41_interleaved", 1))
        ),
    ],
)
def test_pages_of_other_formats(name: str, size: int, page_size: int) -> None:
    """V4.1's rows are read in test_sm90_joined_emulated.py, too."""
    plan = DecodePlan(packed=True, form=ROW_FORMATS[name], tile=WITHOUT_ROPE)
    check_pages(plan, size, 1, page_size)


def check_pages(plan: DecodePlan | FewHeadsPlan, size: int, queries: int, page_size: int) -> None:
    """Two steps, and lengths and sinks beside them if there are two queries; rows that no slot
    names hold NaN, codes and scales."""
    draw, name, heads = torch.Generator().manual_seed(0), plan.form.name, 40 // queries
    rows = flashdsa.quantize_kv(torch.randn(90, 512, generator=draw), kv_format=name)
    q = torch.randn(queries, heads, 512, generator=draw).bfloat16()
    indices = torch.randint(-1, 85, (queries, 180), generator=draw).int()
    given = {}
    if queries > 1:
        given["topk_length"] = torch.tensor([180, 40], dtype=torch.int32)
        given["attn_sink"] = torch.randn(heads, generator=draw)
    expected = reference.sparse_mla_fwd(q, reference.unpack_kv(rows, name), indices, **given)
    rows[85:] = 0xFF
    operands = SparseMlaOperands(q, pages_of(name, rows, page_size), indices, **given)
    assert_near(launched(plan, operands, size, 512**-0.5, LATE), expected)


def check_pages_of_two_sources(plan: DecodePlan | FewHeadsPlan, size: int, queries: int) -> None:
    """Ids beside a range; pages of either source have sizes of their own, one no power of two."""
    draw, name = torch.Generator().manual_seed(0), plan.form.name
    main, extra = (
        flashdsa.quantize_kv(torch.randn(count, 512, generator=draw), kv_format=name)
        for count in (90, 150)
    )
    q = torch.randn(queries, 40 // queries, 512, generator=draw).bfloat16()
    ids = torch.randint(-1, 90, (queries, 100), generator=draw).int()
    starts, ends = (torch.tensor(x[:queries], dtype=torch.int32) for x in ([3, 0], [131, 70]))
    rows, joined = reference.join_sources(
        reference.unpack_kv(main, name),
        ids,
        extra_kv=reference.unpack_kv(extra, name),
        extra_indices=(starts, ends),
    )
    expected = reference.sparse_mla_fwd(q, rows, joined)
    extra[: 3 if queries == 1 else 0], extra[131:] = 0xFF, 0xFF
    sources = pages_of(name, main, 32), ids, None, None, None, pages_of(name, extra, 3)
    operands = SparseMlaOperands(q, *sources, extra_indices=starts[:, None], extra_ends=ends)
    assert_near(launched(plan, operands, size, 512**-0.5, LATE), expected)


POWERS = [7, 0, -8, -14, -15, -20, -24, -27, -33, -60, -127]
"""Of scales; the last give zeros."""
FP32_SCALES = [*(2.0**power for power in POWERS[:7]), -3.7, 1 + 2.0**-23, 146.2, 1 / 3, 0.05]
"""Of those that are no powers of two each product is rounded once."""


@pytest.mark.parametrize(
    "name", ["v4", "v32", *(pytest.param(name, marks=LATER) for name in ("v41", "v32_no_rope"))]
)
def test_values_that_f16_holds_are_read_exactly(name: str) -> None:
    """All codes, beside scales from both ends: a query names one row, so O is its value."""
    form = ROW_FORMATS[name]
    rows = flashdsa.quantize_kv(torch.zeros(4, form.d_qk), kv_format=name)
    codes = torch.arange(form.columns) % 256
    rows[:, : form.columns] = torch.where(codes % 128 == 127, 0, codes).byte()
    number = torch.arange(4)[:, None] * 3 + torch.arange(form.num_scales)
    if form.scale == "fp32":
        scales = torch.tensor(FP32_SCALES)[number % len(FP32_SCALES)].view(torch.uint8)
    else:
        scales = (127 + torch.tensor(POWERS)[number % len(POWERS)]).byte()
    rows[:, form.scales_at : form.scales_at + form.stored_scales] = scales
    if form.scale != "fp32":
        rows[3, : form.group] = codes[: form.group].byte() % 8  # small codes, a large scale
        rows[3, form.scales_at] = 127 + 22
    if form.rope:
        rope = torch.tensor([65280.0, -65280, 2.0**-24, -(2.0**-14), 1.0, 0]).repeat(11)[:64]
        rows[:, form.rope_at : form.rope_at + 128] = rope.bfloat16().view(torch.uint8)
    assert reference.unpack_kv(rows, name)[:, :512].max() > 1e4
    assert_each_row_is_read(name, rows)


@pytest.mark.slow
def test_every_e2m1_times_every_scale_is_read_exactly() -> None:
    rows = torch.zeros(8, 288, dtype=torch.uint8)
    rows[:, :256] = torch.arange(256) % 8 * 0x22 + 0x10  # even columns 0, 2 to 14, odd ones 1 to 15
    scales = torch.arange(256).view(8, 32)
    rows[:, 256:] = torch.where(scales % 128 == 127, 0, scales).byte()  # without NaN
    assert_each_row_is_read("v41_fp4", rows)


def assert_each_row_is_read(name: str, rows: Tensor) -> None:
    """O of a query that names one row is the row's values."""
    count = len(rows)
    slots = torch.arange(count, dtype=torch.int32)[:, None]
    form = ROW_FORMATS[name]
    q = torch.zeros(count, 1, form.d_qk, dtype=torch.bfloat16)
    operands = SparseMlaOperands(q, pages_of(name, rows, 2), slots)
    plan = DecodePlan(packed=True, form=form, tile=Tile(form.d_qk))
    O, _ = launched(plan, operands, 1 if name == "v32" else 2, 1.0)  # that others compile, too
    assert torch.equal(O[:, 0], reference.unpack_kv(rows, name)[:, :512].half().bfloat16())


def test_the_public_operation_takes_every_feature() -> None:
    """Lengths, sinks, gaps, a number of heads that is no tile's; queries without a valid slot."""
    inputs = make_sparse_mla_inputs(ALL_AT_ONCE, 0, "cpu")
    assert failures(check_forward(inputs, "emulate-sm90")) == []


def test_packed_rows_have_every_feature() -> None:
    """The public operation gives so few queries of packed rows to the kernel of few heads."""
    run(replace(ALL_AT_ONCE, packed="ue8m0"), 1)


def test_rows_of_any_size_are_as_right_as_f16_has_them() -> None:
    """A large key's logit feels that f16 holds it; 1 % too much of a row is seen all the same."""
    case = SparseMlaCase("sizes", 1, 192, 64, 192, packed="fp32", row_sizes=2.0)
    out, lse = run(case, 1)
    inputs = make_sparse_mla_inputs(case, 0)
    without = failures(judge_forward(inputs, out, lse))
    assert any(message.startswith("O: row") for message in without)
    spread, _ = reference.sparse_mla_spread(inputs.q, inputs.kv, inputs.indices)
    felt = F16_ROUNDING * spread / out.double().norm(dim=-1)
    assert int((felt < BIAS_TOLERANCE / 2).sum()) > 20
    out[0, felt[0].argmin()] *= 1.01
    assert "too long" in str(failures(judge_forward(inputs, out, lse, backend="emulate-sm90")))


def test_scales_that_f16_has_no_room_for_are_right() -> None:
    """Scales of 2^-20 and any mantissa: values are of a multiple of them first."""
    draw = torch.Generator().manual_seed(0)
    kv = flashdsa.quantize_kv(torch.randn(64, 576, generator=draw) * 2.0**-13, scale="fp32")
    q = torch.randn(1, 40, 576, generator=draw).bfloat16()
    indices = torch.randperm(64, generator=draw).int()[None]
    operands = SparseMlaOperands(q, kv, indices, None, None)
    got = launched(DecodePlan(packed=True), operands, 1, 576**-0.5)
    assert_near(got, reference.sparse_mla_fwd(q, kv, indices))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scale", [0.0, -0.05])
@pytest.mark.parametrize("packed", ["", "ue8m0"])
def test_any_finite_scale_and_large_logits(packed: str, scale: float) -> None:
    run(SparseMlaCase("scale", 1, 50, 8, 300, packed=packed, sm_scale=scale), 2)
    run(SparseMlaCase("huge", 1, 50, 8, 130, packed=packed, logit_scale=1e30), 2)


@pytest.mark.parametrize(
    "plan",
    [
        DecodePlan(),
        DecodePlan(packed=True, single_cta=True),
        DecodePlan(packed=True, form=ROW_FORMATS["v4"], tile=WITHOUT_ROPE),
    ],
    ids=lambda plan: plan.name,
)
def test_products_are_of_what_rows_hold(plan: DecodePlan) -> None:
    text = ptx_of(SPARSE_MLA_DECODE, plan)
    kinds = {"f16"} if plan.packed else {"bf16"}
    if plan.tile.has_rope:
        kinds.add("bf16")
    assert set(re.findall(r"wgmma\.\S*f32\.(\w+)\.\w+ ", text)) == kinds
