"""Two sources, ranges and blocks in the Hopper forward and decode on ptxemu, without a finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa import reference
from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import emulation
from flashdsa.backends.sm90 import sparse_mla_ways
from flashdsa.backends.sm90.decode_cuts import cut_line
from flashdsa.kernels.attention.sm90.core.tile import Tile
from flashdsa.kernels.attention.sm90.decode.full.plan import MIXED_FORMATS, MIXED_PAIRS
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.row_formats import ROW_FORMATS
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from ptxemu.launch_setup import LaunchSetup
from tests.kernels.attention.test_row_formats import rows_of_every_code

LATER = pytest.mark.slow
POOLS = SparseMlaCase(
    "pools of 4 and a tail, as GLM-5.3's", 5, 203, 64, 40, d_qk=512, index_block=4, extra_keys=203,
    extra_topk=13, ranges="extra_kv", invalid=True, empty_rows=True, topk_length=True, poison=True,
    attn_sink="finite",
)  # fmt: skip
"""160 slots and none, none and 1, 160 and 4; 203 is no multiple of 4."""
WINDOW = SparseMlaCase(
    "a window and ids, as DeepSeek-V4's", 8, 300, 20, 129, extra_keys=90, extra_topk=70,
    ranges="kv", duplicates=True, topk_length=True, strided=True, kv_3d=True, indices_3d=True,
    attn_sink="infinite",
)  # fmt: skip
"""Slots from 129 and 35 to 128 and none; one window begins before the first row."""
SMALL = SparseMlaCase(
    "no row, and 5", 3, 0, 20, 64, d_qk=512, extra_keys=5, extra_topk=4, duplicates=True
)


LONG = SparseMlaCase(
    "ids and a window of four items", 4, 384, 64, 300, d_qk=512, extra_keys=256, extra_topk=200,
    ranges="extra_kv", invalid=True, topk_length=True, poison=True, attn_sink="finite",
)  # fmt: skip


def run(case: SparseMlaCase, device: Device, when: str = "late") -> list[LaunchSetup]:
    """The public operation on that device; its results are judged, and nothing may be found. Return
    its launches."""
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    policy = Policy(asynchronous=when, seed=3)
    with emulation(device, policy=policy, on_finding="collect") as emulator:
        assert failures(check_forward(inputs, "emulate-sm90")) == []
    assert [str(finding) for finding in emulator.findings] == []
    return emulator.setups


@pytest.mark.parametrize(
    ("case", "when"),
    [
        (POOLS, "late"),
        (replace(WINDOW, d_qk=512), "eager"),
        pytest.param(WINDOW, "eager", marks=LATER),
        pytest.param(SMALL, "late", marks=LATER),
    ],
)
def test_the_forward_joins_both_sources(case: SparseMlaCase, when: str) -> None:
    """One CTA takes all items, whose last steps have two tiles or one, in turns or, if lists have
    lengths, as it draws them."""
    (setup,) = run(replace(case, max_logits=True), Device(1, {1: 1}), when)
    drawn = case.topk_length or bool(case.ranges)
    plan = FwdPlan(drawn=drawn, joined=True, tile=Tile(case.d_qk))
    assert (setup.grid[0], setup.smem) == (1, plan.smem.total)


@pytest.mark.parametrize(
    ("case", "size", "when"),
    [
        pytest.param(POOLS, 1, "late", marks=LATER),
        (replace(WINDOW, d_qk=512), 2, "eager"),
        (replace(SMALL, topk=129), 3, "late"),
        pytest.param(WINDOW, 2, "eager", marks=LATER),
    ],
)
def test_the_decode_joins_both_sources(case: SparseMlaCase, size: int, when: str) -> None:
    clusters = case.num_queries
    (setup,) = run(case, Device(clusters * size, {1: clusters * size, size: clusters}), when)
    assert setup.grid[0] == clusters * size


@pytest.mark.parametrize(
    ("case", "when"),
    [
        pytest.param(LONG, "late", marks=LATER),
        pytest.param(
            replace(LONG, packed="ue8m0", kv_format="v4", extra_format="v4", page_size=64),
            "eager",
            marks=LATER,
        ),
        (
            replace(
                LONG, num_heads=9, packed="ue8m0", kv_format="v4", extra_format="v4", page_size=64
            ),
            "late",
        ),
    ],
    ids=["bf16", "v4", "v4, few heads"],
)
def test_tiles_of_both_sources_by_stream_k(
    case: SparseMlaCase, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On three SMs; items of unlike lengths are cut inside of either source."""
    assert cut_line([7, 4, 9, 4, 9, 5, 9], 3) == [(0, 0), (2, 3), (4, 6), (7, 0)]
    monkeypatch.setattr(sparse_mla_ways, "stream_k_microseconds", lambda *_: 0.0)
    (setup,) = run(replace(case, num_queries=7), Device(3, {1: 3}), when)
    assert "stream_k" in setup.kernel and setup.grid[0] == 3


@pytest.mark.parametrize("alone", [{"index_block": 4}, {"ranges": "kv"}])
def test_a_source_of_its_own_may_have_blocks_or_be_a_range(alone: dict[str, Any]) -> None:
    run(SparseMlaCase("alone", 3, 200, 8, 70, d_qk=512, **alone), Device(6, {1: 6, 2: 3}))


V41, FP4 = (form.name for form in MIXED_FORMATS)
INTERLEAVED = tuple(form.name for form in MIXED_PAIRS[1])
CASE = SparseMlaCase("ids and a window", 3, 192, 20, 150, d_qk=512, extra_keys=128, extra_topk=90,
                     ranges="extra_kv", invalid=True, empty_rows=True, topk_length=True,
                     poison=True, attn_sink="finite", packed="ue8m0", page_size=64)  # fmt: skip


@pytest.mark.parametrize(
    ("main", "extra", "size"),
    [
        (V41, FP4, 1),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                *((V41, FP4, 2), (FP4, V41, 2), (FP4, V41, 1), (FP4, FP4, 1), (FP4, FP4, 2)),
                *((*INTERLEAVED, 1), (*INTERLEAVED[::-1], 2)),
            )
        ),
    ],
)
def test_the_decode_joins_rows_of_both_formats(main: str, extra: str, size: int) -> None:
    """A step may have a tile of each; the next tile's scales are asked for before it is known."""
    case = replace(CASE, kv_format=main, extra_format=extra)
    (setup,) = run(case, Device(3 * size, {1: 3 * size, size: 3}), "late" if size == 1 else "eager")
    assert setup.grid[0] == 3 * size


@pytest.mark.parametrize(
    ("main", "extra"),
    [(V41, FP4), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((FP4, V41), INTERLEAVED))],
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
            kv_format=extra if main == FP4 else main, backend="emulate-sm90",
        )  # fmt: skip
    assert [str(finding) for finding in emulator.findings] == []
    rows = torch.where(
        number % 32 == 0, values[main][number[:, 0]], values[extra][number[:, 0] + 1]
    )
    expected = rows.half().bfloat16()[:, None].expand_as(out)
    assert torch.equal(out, expected)
    assert not lse.any()


def test_other_formats_are_not_mixed() -> None:
    rows = {name: flashdsa.quantize_kv(torch.zeros(9, 512), kv_format=name) for name in ("v4", V41)}
    q, indices = torch.zeros(2, 16, 512).bfloat16(), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(
        NotImplementedError, match=r"mixed_formats: takes v41, v41_fp4, .*; got v4, v41"
    ):
        flashdsa.sparse_mla_fwd(
            q, rows["v4"], indices, extra_kv=rows[V41], extra_indices=indices, kv_format=V41,
            backend="emulate-sm90",
        )  # fmt: skip
