"""Arguments of Megatron-Core's hooks, and what two ranks check of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from flashdsa.integrations import megatron
from tests.support.formulas import assert_close

SCALE, LATENT, TOPK = 0.3, 32, 3
CONFIG = SimpleNamespace(kv_lora_rank=LATENT)
ONE_RANK = SimpleNamespace(tp=None)


def problem(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Two sequences of six queries and eight keys; a query without keys, ends beyond them."""
    torch.manual_seed(0)
    wide: dict[str, Any] = {"dtype": dtype, "requires_grad": True}
    return {
        "q": torch.randn(6, 2, 5, 128, **wide),
        "k": torch.randn(8, 2, 128, **wide),
        "weights": torch.randn(6, 2, 5, **wide),
        "index_topk": TOPK,
        "starts": torch.tensor([0, 0, 2, 4, 3, 1]),
        "ends": torch.tensor([1, 2, 7, 4, 12, 8]),
    }


def heads(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The attention of these tokens."""
    wide: dict[str, Any] = {"dtype": dtype, "requires_grad": True}
    return {"query": torch.randn(6, 2, 4, 40, **wide), "key": torch.randn(8, 2, 1, 40, **wide)}


def whole(x: dict[str, Any], y: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Arguments of the whole attention."""
    return {
        "config": CONFIG, **y, "value": None, "up_v_weight": torch.ones(4, 7, LATENT),
        "q_indexer": x["q"], "k_indexer": x["k"], "indexer_weights": x["weights"],
        "indexer_topk": TOPK, "softmax_scale": SCALE, "loss_coeff": 0.5, "sparse_loss": True,
        "calculate_per_token_loss": False, "absorbed_mla": True, "cp_size": 1,
        "attn_mask_type": "causal", "packed_seq_params": None, "varlen_starts": x["starts"],
        "varlen_ends": x["ends"], "key_positions": None, "query_valid_rows": None,
        "use_relu": True, "pg_collection": ONE_RANK,
    } | others  # fmt: skip


def half_of_the_heads() -> None:
    """Both losses of two ranks with two heads each are those of one rank with all four."""
    x, y = problem(), heads()
    rank = torch.distributed.get_rank()
    mine = {"query": y["query"][:, :, 2 * rank : 2 * rank + 2], "key": y["key"]}
    group = SimpleNamespace(tp=torch.distributed.group.WORLD)
    for is_sparse in (True, False):
        losses = []
        for one, ranks in ((y, ONE_RANK), (mine, group)):
            answer = megatron.run_fused_dsa_attention(
                **whole(x, one, sparse_loss=is_sparse, pg_collection=ranks)
                | {"up_v_weight": torch.ones(one["query"].shape[2], 7, LATENT)}
            )
            assert answer is not None and answer[1] is not None
            losses.append((answer[1].detach(), *torch.autograd.grad(answer[1], (x["q"], x["k"]))))
        for one_rank, two_ranks in zip(*losses, strict=True):
            assert_close(two_ranks, one_rank, 1e-5)
