"""DeepGEMM's paged logits, the judge of a peer's choice, and scores of chosen distributions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashdsa.bench.cases import Verdict
from flashdsa.bench.indexer import IndexerInputs, judge_positions, scored_rows
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_BYTES, PAGE_KEY_BYTES, PAGE_SIZE

SCORE = 1.265625
"""Score of a token of scale 1 in an adversarial case: the middle of a bin of the ranking."""
_LOGITS_ALIGNMENT, DEEP_GEMM_HEADS = 256, 32


def fill_scores(x: IndexerInputs, data: str, generator: torch.Generator) -> None:
    """One key vector for all tokens and positive weights: a score is SCORE times its scale."""
    device = x.cache.device
    pages = x.cache.view(-1, PAGE_BYTES)
    key = torch.randn(INDEX_HEAD_DIM, generator=generator, device=device).to(torch.float8_e4m3fn)
    pages[:, :PAGE_KEY_BYTES] = key.view(torch.uint8).repeat(PAGE_SIZE)
    weights = x.weights.abs_()
    sums = (x.q.double() @ key.double()).relu() * weights.double()
    weights.mul_((SCORE / sums.sum(-1, keepdim=True)).float())
    for row, length in enumerate(x.lengths):
        taken = x.pages(row)
        scales = torch.ones(len(taken) * PAGE_SIZE, device=device)
        uniform = torch.rand(length, generator=generator, device=device)
        ramp = torch.arange(length, device=device, dtype=torch.float32) / length
        scales[:length] = {
            "equal": torch.ones_like(uniform),
            "ascending": 1 + ramp,
            "descending": 2 - ramp,
            "one bin": 1 + uniform / 256,
        }[data]
        pages[taken, PAGE_KEY_BYTES:] = scales.view(-1, PAGE_SIZE).view(torch.uint8)


def judge_peer(x: IndexerInputs, positions: Tensor) -> Verdict:
    """A peer's positions (B, topk): the rows that it had to choose in, no tie rule."""
    findings, topk = [], x.ids.shape[1]
    for row in scored_rows(len(x.lengths)):
        if x.lengths[row] > topk:
            finding = judge_positions(x, row, positions[row, :topk].long())
            findings += [f"row {row}: {finding}"] if finding else []
    return Verdict({}, findings)


class DeepGemm:
    """DeepGEMM's paged logits of fp8 in their best legal form; beyond a row's length anything.

    It takes 32 or 64 heads, so that fewer are padded, and one or two queries a request: four are
    twice two of the same pages, three are three times one.
    """

    def __init__(self, x: IndexerInputs) -> None:
        self.gemm: Any = import_module("deep_gemm")
        together = {3: 1, 4: 2}.get(x.next_n, x.next_n)
        missing = max(0, DEEP_GEMM_HEADS - x.q.shape[1])
        q = pad(x.q.view(torch.uint8), (0, 0, 0, missing)).view(x.q.dtype)
        table = x.block_table.repeat_interleave(x.next_n // together, 0)
        self.lengths = x.seq_lens.view(-1, together)
        self.width = padded(max(x.lengths))
        operands = q.unflatten(0, (-1, together)), x.cache, pad(x.weights, (0, missing))
        self.operands = (*operands, self.lengths, table)
        self.plan: Any = None

    def make_plan(self) -> None:
        """The scheduling metadata, which depend on lengths alone."""
        sms = self.gemm.get_num_sms()
        self.plan = self.gemm.get_paged_mqa_logits_metadata(self.lengths, PAGE_SIZE, sms)

    def logits(self) -> Tensor:
        """Scores (rows, width)."""
        scores: Tensor = self.gemm.fp8_paged_mqa_logits(
            *self.operands, self.plan, self.width, clean_logits=False
        )
        return scores


def padded(width: int) -> int:
    """As many as DeepGEMM's rows have: a view of fewer would be copied by the top-k."""
    return -(-width // _LOGITS_ALIGNMENT) * _LOGITS_ALIGNMENT
