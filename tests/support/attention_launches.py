"""Operands and choices of attention's launches that a test makes itself."""

from __future__ import annotations

import torch

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_choice import Call, Dkv, Part, choose
from flashdsa.ops.attention import SparseMlaOutOperands
from flashdsa.verify.sparse_mla_cases import SparseMlaInputs


def forward_operands(runner: Runner, inputs: SparseMlaInputs) -> SparseMlaOutOperands:
    """The operands of a case over one source; results are the runner's, with largest logits if the
    case asks for them."""
    case, rows = inputs.case, inputs.q.shape[:2]
    largest = runner.empty(*rows, dtype=torch.float32) if case.max_logits else None
    return SparseMlaOutOperands(
        inputs.q,
        inputs.kv.view(-1, case.d_qk),
        inputs.indices.reshape(case.num_queries, case.topk),
        runner.empty(*rows, case.d_v, dtype=torch.bfloat16),
        runner.empty(*rows, dtype=torch.float32),
        largest,
        inputs.topk_length,
        inputs.attn_sink,
    )


def without_tickets(call: Call) -> tuple[Part, ...]:
    """CTAs take turns."""
    return tuple(part._replace(tickets=False, dkv=Dkv.ADDED) for part in choose(call))
