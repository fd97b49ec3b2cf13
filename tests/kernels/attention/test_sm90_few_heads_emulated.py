"""The Hopper decode of items of 16 heads on ptxemu: within the contract, without a finding."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa import reference
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import HEADS, FewHeadsPlan
from flashdsa.kernels.catalog import SPARSE_MLA_DECODE_FEW_HEADS
from flashdsa.ops.attention import SparseMlaOperands
from flashdsa.row_formats import ROW_FORMATS, RowFormat
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.attention.test_row_formats import rows_of_every_code
from tests.kernels.attention.test_sm90_decode_emulated import (
    check_pages_of_two_sources,
    launched,
    pages_of,
    run,
)
from tests.kernels.findings import EVERY_FEATURE
from tests.support.compilations import ptx_of

TWO_STEPS = SparseMlaCase(
    "two steps", 1, 90, 11, 180, packed="ue8m0", duplicates=True, invalid=True, poison=True
)
ALL_AT_ONCE = SparseMlaCase(
    "every feature", 3, 60, 20, 140, packed="ue8m0", attn_sink="infinite",
    **EVERY_FEATURE | {"kv_3d": False},
)  # fmt: skip


NO_ROPE = FewHeadsPlan.formats[1]


@pytest.mark.parametrize("size", [2, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 3))])
def test_rows_without_rope_in_pages(size: int) -> None:
    """Seven steps, four and so on; every feature but a second source."""
    case = SparseMlaCase(
        "no RoPE", 2, 192, 13, 420, d_qk=512, packed="fp32", kv_format=NO_ROPE.name,
        page_size=64, invalid=True, topk_length=True, poison=True, attn_sink="finite",
    )  # fmt: skip
    asynchronous = "late" if size == 1 else "eager"
    run(case, size, Policy(asynchronous=asynchronous, seed=3), FewHeadsPlan(NO_ROPE))


@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_pages_of_two_sources_of_v4(size: int) -> None:
    check_pages_of_two_sources(FewHeadsPlan(ROW_FORMATS["v4"], joined=True), size, 2)


def test_every_code_of_rows_without_rope_beside_every_scale() -> None:
    """Queries that name one row each get it, rounded once; scales that fp16 cannot hold, too."""
    rows = rows_of_every_code(NO_ROPE)[:64]
    codes = rows[:, : NO_ROPE.code_bytes]
    codes[codes % 128 == 127] = 0
    scales = torch.tensor([1.0, -3.7, 2.0**-20, 1e-4 / 448])[torch.arange(256) % 4].view(64, 4)
    rows[:, NO_ROPE.scales_at : NO_ROPE.scales_at + 16] = scales.view(torch.uint8)
    q = torch.zeros(5, 9, 512).bfloat16()
    slots = torch.arange(0, 64, 13, dtype=torch.int32)[:, None]
    O, lse = launched(FewHeadsPlan(NO_ROPE), SparseMlaOperands(q, rows, slots), 1, 1.0)
    expected = reference.unpack_kv(rows, NO_ROPE.name)[slots[:, 0].long(), None].expand_as(O)
    # P of one key is 1, times a scale in f16.
    assert ((O.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-24).all()
    assert not lse.any()


def test_every_code_of_v4_beside_scales_far_apart() -> None:
    """Likewise, of two sources in turn; the bf16 columns are those that f16 holds."""
    form = ROW_FORMATS["v4"]
    rows = flashdsa.quantize_kv(torch.zeros(4, 512), kv_format="v4")
    codes = (torch.arange(448) + torch.arange(4)[:, None] * 64) % 256
    rows[:, :448] = torch.where(codes % 128 == 127, 0, codes).byte()
    powers = torch.tensor([0, -3, 7, -14, 5, -20, -9, 2])
    scales = (127 + powers[(torch.arange(7) + torch.arange(4)[:, None]) % 8]).byte()
    rows[:, form.scales_at : form.scales_at + 7] = scales
    rope = torch.tensor([65280.0, -65280, 2.0**-24, -(2.0**-14), 1.0, 0]).repeat(11)[:64]
    rows[:, form.rope_at : form.rope_at + 128] = rope.bfloat16().view(torch.uint8)
    slots, pages = torch.arange(4, dtype=torch.int32)[:, None], pages_of("v4", rows, 2)
    even, odd = (torch.where(slots % 2 == first, slots, -1) for first in range(2))
    sources = {"extra_kv": pages, "extra_indices": odd}
    operands = SparseMlaOperands(torch.zeros(4, 9, 512).bfloat16(), pages, even, **sources)
    O, lse = launched(FewHeadsPlan(form, joined=True), operands, 1, 1.0)
    expected = reference.unpack_kv(rows, "v4")[:, None].expand_as(O)
    assert torch.equal(O, expected.half().bfloat16())
    assert not lse.any()


def test_clusters_of_any_size_give_the_same() -> None:
    """With three tiles at most three CTAs have one; the others take no part."""
    plan = FewHeadsPlan()
    first_O, first_lse = run(TWO_STEPS, 1, plan=plan)
    for size, asynchronous in ((2, "late"), (5, "eager")):
        O, lse = run(TWO_STEPS, size, Policy(asynchronous=asynchronous, seed=3), plan)
        # P is rounded against other maxima.
        assert (O.double() - first_O.double()).norm() <= 2e-3 * first_O.double().norm()
        torch.testing.assert_close(lse, first_lse, rtol=1e-6, atol=1e-6)


def test_the_public_operation_takes_every_feature(small_device: None) -> None:
    """Lengths, sinks, gaps, a number of heads that is no tile's; queries without a valid slot."""
    inputs = make_sparse_mla_inputs(ALL_AT_ONCE, 0, "cpu")
    assert failures(check_forward(inputs, "emulate-sm90")) == []


def test_a_ring_goes_round() -> None:
    """Seven steps: each stage is filled several times, by one warp and the other one."""
    case = SparseMlaCase("rounds", 1, 90, 27, 800, packed="fp32")
    run(case, 1, Policy(asynchronous="late", seed=0), FewHeadsPlan())


def test_scales_of_a_query_may_be_far_apart(small_device: None) -> None:
    """From 2^-30 to 2^3 and any mantissa: P is multiplied by them before it becomes f16."""
    draw = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.linspace(-21, 12, 64)[torch.randperm(64, generator=draw), None]
    kv = flashdsa.quantize_kv(torch.randn(64, 576, generator=draw) * sizes, scale="fp32")
    q = torch.randn(1, 8, 576, generator=draw).bfloat16() * 2.0**-12
    indices = torch.randperm(64, generator=draw).int()[None]
    for rows in (indices, indices[:, sizes[indices[0].long(), 0] < 2.0**-8]):
        O, lse = flashdsa.sparse_mla_fwd(q, kv, rows, backend="emulate-sm90")
        ref_O, ref_lse = reference.sparse_mla_fwd(q, kv, rows)
        assert (O.double() - ref_O).norm() <= 2.5e-3 * ref_O.norm()
        torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scale", [0.0, -0.05])
def test_any_finite_scale_and_large_logits(scale: float) -> None:
    plan = FewHeadsPlan()
    case = SparseMlaCase("scale", 1, 50, 8, 300, packed="ue8m0", sm_scale=scale)
    run(case, 2, plan=plan)
    case = SparseMlaCase("huge", 1, 50, 8, 130, packed="ue8m0", logit_scale=1e30)
    run(case, 2, plan=plan)


@pytest.mark.parametrize(
    "form",
    [FewHeadsPlan.formats[0], pytest.param(FewHeadsPlan.formats[1], marks=pytest.mark.slow)],
    ids=lambda form: form.name,
)
def test_the_products_are_those_of_the_design(form: RowFormat) -> None:
    plan = FewHeadsPlan(form)
    text = ptx_of(SPARSE_MLA_DECODE_FEW_HEADS, plan)
    kinds = {"bf16", "f16"} if plan.tile.has_rope else {"f16"}
    assert set(re.findall(r"wgmma\.\S*f32\.(\w+)\.\w+ ", text)) == kinds
    assert set(re.findall(r"wgmma\.\S*m64n(\d+)k16", text)) == {str(HEADS)}
