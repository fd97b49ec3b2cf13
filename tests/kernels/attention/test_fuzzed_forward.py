"""Cases of the forward drawn at random: legal calls, and every way in which Hopper serves them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashdsa import reference
from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.emulated.runner import running_on
from flashdsa.kernels.attention.sm90.decode.full.plan import JOINED_FORMATS, MIXED_FORMATS
from flashdsa.kernels.catalog import (
    SPARSE_MLA_DECODE,
    SPARSE_MLA_DECODE_DEALT,
    SPARSE_MLA_DECODE_DEALT_FEW_HEADS,
    SPARSE_MLA_DECODE_FEW_HEADS,
)
from flashdsa.row_formats import ROW_FORMATS
from flashdsa.verify import calls
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward
from flashdsa.verify.launch_list import Recorder
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs

FUZZED = 500
BATCH = 50
"""Cases of one test."""
FURTHER = (12, 53, 91, 1028, 1221)
"""Seeds of one case each, for kernels that no other case reaches."""
MIXED = tuple(form.name for form in MIXED_FORMATS)


def sources(draw: random.Random) -> dict[str, Any]:
    """Features of the rows: bf16 or of any format, of one source or two, named by ids or ranges."""
    found: dict[str, Any] = {"d_qk": draw.choice([512, 512, 576])}
    two = draw.random() < 0.4
    if draw.random() < 0.4:
        found["max_logits"] = draw.random() < 0.3
    elif found["d_qk"] == 576:  # packed rows with RoPE columns of which only one list is taken
        return found | {"packed": draw.choice(["ue8m0", "fp32"]), "page_size": draw.choice([0, 64])}
    else:
        form = draw.choice(["v32_no_rope", *(form.name for form in JOINED_FORMATS)])
        scale = draw.choice(["ue8m0", "fp32"]) if form == "v32_no_rope" else "ue8m0"
        found |= {"packed": scale, "kv_format": form, "page_size": draw.choice([0, 64])}
        if two:
            found["extra_format"] = draw.choice(MIXED) if form in MIXED else form
    if two:
        found |= {"extra_keys": draw.choice([5, 90, 300]), "extra_topk": draw.choice([3, 64, 128])}
        found["ranges"] = draw.choice(["", "kv", "extra_kv", "kv and extra_kv"])
    if "kv" not in found.get("ranges", "").split() and draw.random() < 0.25:
        found["index_block"] = draw.choice([4, 64])
    return found


def drawn(draw: random.Random, number: int) -> SparseMlaCase:
    """Any shape and features: few queries, a wave of them, or so many that they are grouped."""
    found, heads = sources(draw), draw.choice([1, 8, 16, 16, 20, 32, 64, 65, 100, 128])
    queries, topk = draw.randint(1, 12), draw.choice([1, 63, 64, 127, 128, 129, 500])
    size = draw.random()
    if heads in (8, 16, 32) and "packed" not in found and size < 0.3:
        queries, topk = (64 // heads - 1) * 132 + draw.randint(1, 40), draw.randint(1, 70)
    elif size > 0.6:
        queries, topk = draw.choice([40, 70, 70, 135, 150]), draw.choice([40, 1000, 2048])
    page, largest = found.get("page_size"), 1000 if "packed" in found else 5000
    return SparseMlaCase(
        f"fuzzed {number}", queries,
        draw.choice([64, 320, 1024] if page else [1, 63, 64, 65, 300, largest]), heads, topk,
        duplicates=draw.random() < 0.3, invalid=draw.random() < 0.5, empty_rows=draw.random() < 0.3,
        topk_length=draw.random() < 0.5, attn_sink=draw.choice([None, "finite", "infinite"]),
        poison=draw.random() < 0.3, strided=draw.random() < 0.3, **found,
    )  # fmt: skip


def batch_of(number: int) -> list[SparseMlaCase]:
    """The cases of one test; with these seeds all of them reach every kernel."""
    draw = random.Random(1000 + number)
    cases = [drawn(draw, number * BATCH + at) for at in range(BATCH)]
    if number == 0:
        cases += [drawn(random.Random(seed), seed) for seed in FURTHER]
    return cases


def test_tiny_forms_of_fuzzed_cases_are_legal_and_within_the_contract() -> None:
    for case in batch_of(0):
        most = {"num_queries": 3, "num_heads": 2, "topk": 20, "num_keys": 320}
        tiny = replace(case, **{name: min(getattr(case, name), n) for name, n in most.items()})
        assert failures(check_forward(make_sparse_mla_inputs(tiny, 0), "cpu")) == [], tiny


@pytest.mark.slow
def test_fuzzed_cases_reach_every_kind_of_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper serves each."""

    def packed(kv: torch.Tensor, scale: str, form: str) -> torch.Tensor:
        return torch.zeros(len(kv), ROW_FORMATS[form].row_bytes, dtype=torch.uint8)

    zeros = lambda *shape, generator=None, **kind: torch.zeros(*shape, **kind)
    monkeypatch.setattr(torch, "randn", zeros)  # kernels are chosen by shapes and lists
    monkeypatch.setattr(reference, "quantize_kv", packed)
    recorder = Recorder(H200)
    with running_on(recorder):
        for number in range(FUZZED // BATCH):
            for case in batch_of(number):
                calls.sparse_mla_fwd(make_sparse_mla_inputs(case, 0), "emulate-sm90")
    decodes = (SPARSE_MLA_DECODE, SPARSE_MLA_DECODE_DEALT)
    few = (SPARSE_MLA_DECODE_FEW_HEADS, SPARSE_MLA_DECODE_DEALT_FEW_HEADS)
    wanted = {plan.name for spec in (*decodes, *few) for plan in spec.plans}
    assert wanted - set(recorder.launched) == set()
    assert {group for group in (2, 4, 8) if f"group{group}" not in str(recorder.launched)} == set()
