"""Hopper's decode of two sources whose packed rows have formats of their own, on ptxemu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa import reference
from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import emulation
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE
from flashdsa.kernels.attention.sm90.decode.full.plan import MIXED_FORMATS, DecodePlan
from flashdsa.kernels.catalog import SPARSE_MLA_DECODE
from flashdsa.row_formats import ROW_FORMATS
from flashdsa.verify.sparse_mla_cases import SparseMlaCase
from tests.kernels.assembled import assert_it_assembles_without_spills
from tests.kernels.attention.test_row_formats import rows_of_every_code
from tests.kernels.attention.test_sm90_joined_emulated import run

V41, FP4 = (form.name for form in MIXED_FORMATS)
CASE = SparseMlaCase("ids and a window", 3, 192, 20, 150, d_qk=512, extra_keys=128, extra_topk=90,
                     ranges="extra_kv", invalid=True, empty_rows=True, topk_length=True,
                     poison=True, attn_sink="finite", packed="ue8m0", page_size=64)  # fmt: skip


@pytest.mark.parametrize(
    ("main", "extra", "size"),
    [
        (V41, FP4, 1),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in ((V41, FP4, 2), (FP4, V41, 2), (FP4, V41, 1), (FP4, FP4, 1), (FP4, FP4, 2))
        ),
    ],
)
def test_the_decode_joins_rows_of_both_formats(main: str, extra: str, size: int) -> None:
    """A step may have a tile of each; the next tile's scales are asked for before it is known."""
    case = replace(CASE, kv_format=main, extra_format=extra)
    (setup,) = run(case, Device(3 * size, {1: 3 * size, size: 3}), "late" if size == 1 else "eager")
    assert setup.grid[0] == 3 * size


@pytest.mark.parametrize(
    ("main", "extra"), [(V41, FP4), pytest.param(FP4, V41, marks=pytest.mark.slow)]
)
def test_every_code_of_both_formats_is_read(main: str, extra: str) -> None:
    """Queries that name one row each get it: even ones of the main source, odd ones of the other;
    f16 holds each value, as scales are small here."""
    kinds, values = {}, {}
    for name, form in ((main, ROW_FORMATS[main]), (extra, ROW_FORMATS[extra])):
        rows = rows_of_every_code(form)
        scales = rows[:, form.scales_at : form.scales_at + form.stored_scales]
        # e8m0 of 2^-7 to 2^6; every e4m3 scale that is a number.
        scales[:] = scales % 14 + 120 if form.scale == "e8m0" else scales % 127
        if not form.fp4:
            codes = rows[:, : form.code_bytes]
            codes[codes % 128 == 127] = 0
        kinds[name], values[name] = rows, reference.unpack_kv(rows, name)
    number = torch.arange(0, 256, 16, dtype=torch.int32)[:, None]
    indices = torch.where(number % 32 == 0, number, -1)
    others = torch.where(number % 32 == 0, -1, number + 1)
    q = torch.zeros(len(number), 8, 512, dtype=torch.bfloat16)
    with emulation(Device(16, {1: 16}), on_finding="collect") as emulator:
        out, lse = flashdsa.sparse_mla_fwd(
            q, kinds[main], indices, extra_kv=kinds[extra], extra_indices=others,
            kv_format=V41, backend="emulate-sm90",
        )  # fmt: skip
    assert [str(finding) for finding in emulator.findings] == []
    rows = torch.where(
        number % 32 == 0, values[main][number[:, 0]], values[extra][number[:, 0] + 1]
    )
    expected = rows.half().bfloat16()[:, None].expand_as(out)
    assert torch.equal(out, expected)
    assert not lse.any()


@pytest.mark.slow
def test_the_newest_assembler_takes_it_and_spills_nothing() -> None:
    form = ROW_FORMATS[V41]
    plan = DecodePlan(packed=True, joined=True, form=form, extra=FP4, tile=WITHOUT_ROPE)
    assert_it_assembles_without_spills(SPARSE_MLA_DECODE, plan)


def test_other_formats_are_not_mixed() -> None:
    rows = {name: flashdsa.quantize_kv(torch.zeros(9, 512), kv_format=name) for name in ("v4", V41)}
    q, indices = torch.zeros(2, 16, 512).bfloat16(), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="mixed_formats: takes v41, v41_fp4; got v4, v41"):
        flashdsa.sparse_mla_fwd(
            q, rows["v4"], indices, extra_kv=rows[V41], extra_indices=indices, kv_format=V41,
            backend="emulate-sm90",
        )  # fmt: skip
