"""The Hopper decode of 64 heads with keys as rows on ptxemu: within the contract, without a
finding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa import reference
from flashdsa.backends.emulated.runner import compiled
from flashdsa.backends.packed_rows import parts_of
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.attention.sm90.decode.full.plan import DecodePlan
from flashdsa.kernels.attention.sm90.decode.many_heads.plan import ManyHeadsPlan
from flashdsa.kernels.catalog import SPARSE_MLA_DECODE_MANY_HEADS
from flashdsa.ops.attention import SparseMlaOperands
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from flashdsa.verify.tolerances import BIAS_TOLERANCE, F16_ROUNDING
from ptxemu import Policy
from tests.kernels.assembled import assert_it_assembles_without_spills
from tests.kernels.attention.test_row_formats import rows_of_every_code
from tests.kernels.attention.test_sm90_decode_emulated import launched, pages_of, run

NO_ROPE = ManyHeadsPlan.formats[1]
TWO_STEPS = SparseMlaCase(
    "two steps", 1, 90, 64, 180, packed="ue8m0", duplicates=True, invalid=True, poison=True
)


@pytest.mark.parametrize("asynchronous", ["late", "eager"])
def test_an_odd_number_of_tiles(asynchronous: str) -> None:
    """Consumer 1 has no tile of the last step."""
    run(TWO_STEPS, 1, Policy(asynchronous=asynchronous, seed=3), ManyHeadsPlan())


def test_several_items_of_a_query_and_empty_lists() -> None:
    """72 heads: the second item has eight; lengths down to 0, a sink, any fp32 scales."""
    case = SparseMlaCase(
        "items", 3, 300, 72, 300, packed="fp32", invalid=True, poison=True, topk_length=True,
        attn_sink="finite",
    )  # fmt: skip
    run(case, 1, Policy(asynchronous="late", seed=0), ManyHeadsPlan())


@pytest.mark.parametrize("plan", [DecodePlan(packed=True), ManyHeadsPlan()])
def test_rows_of_any_size_are_as_right_as_f16_has_them(plan: Any) -> None:
    """A large key's logit feels that f16 holds it; 1 % too much of a row is seen all the same."""
    case = SparseMlaCase("sizes", 1, 192, 64, 192, packed="fp32", row_sizes=2.0)
    out, lse = run(case, 1, plan=plan)
    inputs = make_sparse_mla_inputs(case, 0)
    without = failures(judge_forward(inputs, out, lse))
    assert any(message.startswith("O: row") for message in without)
    spread, _ = reference.sparse_mla_spread(inputs.q, inputs.kv, inputs.indices)
    felt = F16_ROUNDING * spread / out.double().norm(dim=-1)
    assert int((felt < BIAS_TOLERANCE / 2).sum()) > 20
    out[0, felt[0].argmin()] *= 1.01
    assert "too long" in str(failures(judge_forward(inputs, out, lse, backend="emulate-sm90")))


def test_rows_without_rope_in_pages() -> None:
    """The ring of pieces goes round twice."""
    case = SparseMlaCase(
        "no RoPE", 2, 192, 64, 620, d_qk=512, packed="fp32", kv_format=NO_ROPE.name, page_size=64,
        invalid=True, topk_length=True, poison=True, attn_sink="infinite",
    )  # fmt: skip
    run(case, 1, Policy(seed=1), ManyHeadsPlan(NO_ROPE))


def test_pages_of_two_sources() -> None:
    """Ids beside a range; a page of either source has a size of its own."""
    draw = torch.Generator().manual_seed(0)
    main, extra = (
        flashdsa.quantize_kv(torch.randn(count, 512, generator=draw), kv_format=NO_ROPE.name)
        for count in (90, 150)
    )
    q = torch.randn(2, 40, 512, generator=draw).bfloat16()
    ids = torch.randint(-1, 90, (2, 100), generator=draw).int()
    starts = torch.tensor([[3], [0]], dtype=torch.int32)
    ends = torch.tensor([131, 70], dtype=torch.int32)
    rows, joined = reference.join_sources(
        reference.unpack_kv(main, NO_ROPE.name),
        ids,
        extra_kv=reference.unpack_kv(extra, NO_ROPE.name),
        extra_indices=(starts[:, 0], ends),
    )
    expected = reference.sparse_mla_fwd(q, rows, joined)
    extra[131:] = 0xFF
    operands = SparseMlaOperands(
        q,
        pages_of(NO_ROPE.name, main, 32),
        ids,
        extra_kv=pages_of(NO_ROPE.name, extra, 3),
        extra_indices=starts,
        extra_ends=ends,
    )
    plan = ManyHeadsPlan(NO_ROPE, joined=True)
    O, lse = launched(plan, operands, 1, 512**-0.5, Policy(asynchronous="late"))
    assert (O.double() - expected[0]).norm() <= 2.5e-3 * expected[0].norm()
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "growing", "bound", "of_lse"),
    [("ue8m0", True, 2e-3, 5e-6), ("ue8m0", False, 2e-3, 5e-6), ("fp32", True, 4e-3, 3e-4)],
)
def test_maxima_move_again_and_again(
    scale: str, growing: bool, bound: float, of_lse: float
) -> None:
    """Logits from one tile to the next 40 apart, up or down, to 320; scales grow by 2^12 likewise.

    Scales other than powers of two are rounded to f16, which logits of 300 feel.
    """
    draw = torch.Generator().manual_seed(0)
    order = torch.arange(256) // 64
    order = order if growing else 3 - order
    kv = torch.randn(256, 576, generator=draw) * 2.0 ** (4.0 * order[:, None])
    q = torch.randn(1, 64, 576, generator=draw) * 2.0**-6
    q[:, ::2] *= 2.0**-8
    kv[:, 512] = 40.0 * order
    q[:, :, 512] = 24.0
    q = q.bfloat16()
    packed = flashdsa.quantize_kv(kv, scale=scale)
    rows = reference.unpack_kv(packed)
    slots = torch.arange(256, dtype=torch.int32)[None]
    # The heaviest keys alone would be all that counts.
    for indices in (slots, slots[:, order != 3]):
        operands = SparseMlaOperands(q, packed, indices.contiguous())
        O, lse = launched(ManyHeadsPlan(), operands, 1, 576**-0.5)
        expected = reference.sparse_mla_fwd(q, rows, indices)
        assert (O.double() - expected[0]).norm() <= bound * expected[0].norm()
        torch.testing.assert_close(lse.double(), expected[1], rtol=of_lse, atol=2e-5)


def test_every_code_beside_scales_far_apart() -> None:
    """Queries that name one row each get it, rounded to f16 and then to bf16."""
    rows = rows_of_every_code(NO_ROPE)[:16]
    codes = parts_of(rows, NO_ROPE)[0]
    codes[codes % 128 == 127] = 0
    powers = torch.tensor([0, -3, 7, -9])
    scales = (2.0 ** powers[(torch.arange(4) + torch.arange(16)[:, None]) % 4]).float()
    rows[:, NO_ROPE.scales_at : NO_ROPE.scales_at + 16] = scales.view(torch.uint8)
    slots = torch.arange(16, dtype=torch.int32)[:, None]
    q = torch.zeros(16, 20, 512).bfloat16()
    operands = SparseMlaOperands(q, pages_of(NO_ROPE.name, rows, 4), slots)
    O, lse = launched(ManyHeadsPlan(NO_ROPE), operands, 1, 1.0)
    expected = reference.unpack_kv(rows, NO_ROPE.name)[:, None].expand_as(O)
    assert torch.equal(O, expected.bfloat16())
    assert not lse.any()


@pytest.mark.parametrize("scale", [0.0, -0.05])
def test_any_finite_scale(scale: float) -> None:
    case = SparseMlaCase("scale", 1, 50, 64, 130, packed="ue8m0", sm_scale=scale)
    run(case, 1, plan=ManyHeadsPlan())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_order_of_warps_does_not_matter() -> None:
    """Many rounds of each stage."""
    case = SparseMlaCase("steps", 1, 90, 64, 1000, packed="fp32", topk_length=True)
    for seed in range(5):
        run(case, 1, Policy(seed=seed), ManyHeadsPlan())


@pytest.mark.parametrize(
    "plan",
    [
        ManyHeadsPlan(),
        pytest.param(ManyHeadsPlan(NO_ROPE), marks=pytest.mark.slow),
        pytest.param(ManyHeadsPlan(NO_ROPE, joined=True), marks=pytest.mark.slow),
    ],
    ids=lambda plan: plan.name,
)
def test_the_newest_assembler_takes_it_and_spills_nothing(
    tmp_path: Path, plan: ManyHeadsPlan
) -> None:
    """Nor does it make a wgmma wait for the one before, which it says as a warning."""
    text = str(compiled(SPARSE_MLA_DECODE_MANY_HEADS, plan).__ptx__).rstrip("\0")
    kinds = {"bf16", "f16"} if plan.form.rope else {"f16"}
    assert set(re.findall(r"wgmma\.\S*f32\.(\w+)\.\w+ ", text)) == kinds
    assert set(re.findall(r"wgmma\.\S*m64n(\d+)k16", text)) == {str(ROWS)}
    assert_it_assembles_without_spills(text, tmp_path)
