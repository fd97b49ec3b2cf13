"""VeOmni's functions on tensors, without VeOmni; test_contracts.py reads VeOmni itself."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
import torch

from flashdsa.integrations import veomni
from tests.support.formulas import assert_close, attention, index_scores
from tests.support.stubs import stub

LENGTH, TOPK = 9, 4


@pytest.mark.parametrize("heads_of_keys", [False, True])
def test_the_indexer_chooses_in_causal_order(heads_of_keys: bool) -> None:
    """A short list ends with later keys, each once; topk beyond the keys takes all."""
    torch.manual_seed(0)
    q, k = torch.randn(2, LENGTH, 5, 128), torch.randn(2, LENGTH, 128)
    w = torch.randn(2, LENGTH, 5).bfloat16()
    given = k.unsqueeze(2) if heads_of_keys else k
    ids = veomni.indexer_select_topk(q, given, w, TOPK, qhead_per_kv_head=5, sm_scale=0.1)
    assert ids.shape == (2, LENGTH, TOPK) and ids.dtype == torch.int64
    for b in range(2):
        scores = index_scores(q[b], k[b], torch.ones(LENGTH), w[b])
        for s in range(LENGTH):
            best = scores[s, : s + 1].topk(min(TOPK, s + 1)).indices.tolist()
            row = ids[b, s].tolist()
            assert sorted(i for i in row if i <= s) == sorted(best)
            assert len({*row}) == TOPK and max(row) < LENGTH
    every = veomni.indexer_select_topk(q, given, w, 20)
    assert torch.equal(every.sort().values, torch.arange(LENGTH).expand(2, LENGTH, LENGTH))


def test_the_indexer_refuses_what_it_does_not_know() -> None:
    q, k, w = torch.randn(1, 4, 2, 128), torch.randn(1, 5, 128), torch.randn(1, 4, 2)
    for keys, ratio in ((k, 1), (k[:, :4], 2)):
        with pytest.raises(NotImplementedError, match="ratio 1 and as many keys as queries"):
            veomni.indexer_select_topk(q, keys, w, 2, ratio=ratio)


def test_the_attention_leaves_later_keys_out() -> None:
    torch.manual_seed(1)
    parts = [
        torch.randn(2, LENGTH, heads, width, dtype=torch.float64, requires_grad=True)
        for heads, width in ((3, 8), (1, 8), (1, 32), (3, 32))
    ]
    q_pe, k_pe, latent, q_nope = parts
    ids = torch.stack([torch.randperm(LENGTH)[:TOPK] for _ in range(2 * LENGTH)])
    ids[5, 1] = -1
    ids = ids.view(2, LENGTH, TOPK)
    assert veomni.check_flash_mla_sparse_forward_compatible(*parts, ids) == (True, "")
    out = veomni.flash_mla_sparse_attention_with_cudnn_backward(*parts, ids, softmax_scale=0.3)
    q, kv = torch.cat([q_nope, q_pe], -1), torch.cat([latent, k_pe], -1).squeeze(2)
    total = out.new_zeros(())
    for b in range(2):
        rows = [[i for i in row if 0 <= i <= s] for s, row in enumerate(ids[b].tolist())]
        expected, _ = attention(q[b], kv[b], rows, 0.3, d_v=32)
        assert_close(out[b].detach(), expected.detach(), 1e-11)
        total = total + expected.square().sum()
    ours = torch.autograd.grad(out.square().sum(), parts)
    for mine, formula in zip(ours, torch.autograd.grad(total, parts), strict=True):
        assert_close(mine, formula, 1e-11)


def test_other_tensors_are_not_compatible() -> None:
    q_pe, k_pe = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 1, 8)
    latent, q_nope, ids = torch.randn(1, 4, 1, 32), torch.randn(1, 4, 2, 32), torch.zeros(1, 4, 2)
    check = veomni.check_flash_mla_sparse_forward_compatible
    for answer in (
        check(q_pe, k_pe, latent, q_nope, None),
        check(q_pe, k_pe, latent, q_nope, ids, torch.zeros(2)),
        check(q_pe, k_pe.expand(-1, -1, 2, -1), latent, q_nope, ids),
        check(q_pe[:, :3], k_pe, latent, q_nope, ids),
    ):
        assert not answer[0] and answer[1].startswith("flashdsa: ")


def test_the_module_is_in_the_place_of_veomnis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own needs packages that are not there."""
    stub(monkeypatch, veomni.TARGET.rpartition(".")[0])
    monkeypatch.delitem(sys.modules, veomni.TARGET, raising=False)
    veomni.register()
    assert import_module(veomni.TARGET) is veomni
