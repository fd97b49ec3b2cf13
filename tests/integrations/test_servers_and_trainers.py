"""Megatron-Core's and SGLang's hooks on tensors, without these packages.

What they look like in the packages themselves is in test_contracts.py.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdsa.integrations import megatron, sglang
from tests.support.formulas import assert_close, attention
from tests.support.stubs import stub

# Megatron-Core


def test_megatrons_sparse_attention_and_its_gradients() -> None:
    """Two sequences, ids within each; -1 and ids beyond are invalid; slots past topk_length too."""
    torch.manual_seed(0)
    query = torch.randn(3, 2, 4, 40, dtype=torch.float64, requires_grad=True)
    key = torch.randn(5, 2, 1, 40, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[[0, 1, -1], [4, 4, 2], [3, 5, 0]], [[2, -1, -1], [1, 0, 3], [-1, -1, 4]]])
    lengths = torch.tensor([[3, 3, 3], [3, 2, 2]])
    got = megatron.run_fused_absorbed_sparse_attention(query, key, ids, 0.3, 32, lengths)
    assert got is not None and got.shape == (3, 2, 4, 32)
    rows = [[0, 1], [4, 4, 2], [3, 0], [7], [6, 5], []]
    flat = query.transpose(0, 1).reshape(6, 4, 40), key.squeeze(2).transpose(0, 1).reshape(10, 40)
    expected, _ = attention(*flat, rows, 0.3, d_v=32)
    assert_close(got.transpose(0, 1).reshape(6, 4, 32).detach(), expected, 1e-11)
    dout = torch.randn_like(got)
    ours = torch.autograd.grad(got, (query, key), dout)
    by_formula, _ = dense(query, key, rows, 0.3)
    for mine, theirs in zip(ours, torch.autograd.grad(by_formula, (query, key), dout), strict=True):
        assert_close(mine, theirs, 1e-11)


def dense(query: Tensor, key: Tensor, rows: list[list[int]], scale: float) -> tuple[Tensor, None]:
    """The same, differentiable by torch, of two sequences of five keys."""
    out = torch.zeros(3, 2, 4, 32, dtype=torch.float64)
    for number, keys in enumerate(rows):
        b, s = divmod(number, 3)
        if keys:
            chosen = key[[k - 5 * b for k in keys], b, 0]
            weights = torch.softmax(scale * query[s, b] @ chosen.T, dim=1)
            out[s, b] = weights @ chosen[:, :32]
    return out, None


def test_megatron_is_declined_what_is_not_served() -> None:
    query, key = torch.randn(3, 2, 4, 40), torch.randn(5, 2, 1, 40)
    ids = torch.zeros(2, 3, 3, dtype=torch.int64)

    def run(query: Tensor, key: Tensor, ids: Tensor) -> Tensor | None:
        return megatron.run_fused_absorbed_sparse_attention(query, key, ids, 0.3, 32)

    assert run(query, key, ids) is not None
    assert run(query, key.expand(-1, -1, 2, -1), ids) is None
    assert run(query, key, ids[:1]) is None
    assert run(query[0], key, ids) is None
    assert run(query, key[..., :36], ids) is None


def test_megatron_knows_the_backend_by_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = stub(monkeypatch, "megatron.core.utils", _VALID_DSA_KERNEL_BACKENDS=("none", "cudnn"))
    table: dict[str, str] = {"cudnn": "cudnn"}
    kernels = stub(
        monkeypatch,
        "megatron.core.transformer.experimental_attention_variant.dsa_kernels",
        _BACKEND_MODULE_NAME_BY_BACKEND=table,
    )
    megatron.register()
    megatron.register()
    assert import_module(table["flashdsa"]) is megatron
    assert utils._VALID_DSA_KERNEL_BACKENDS == ("none", "cudnn", "flashdsa")
    del kernels._BACKEND_MODULE_NAME_BY_BACKEND
    with pytest.raises(NotImplementedError, match="megatron-core"):
        megatron.register()


CSA = "megatron.core.transformer.experimental_attention_variant.csa"


def csa_by_torch(query: Tensor, kv: Tensor, sink: Tensor, ids: Tensor, scale: float) -> Tensor:
    """The same of (rows, heads, d) and (rows, d), gathered row by row, differentiable by torch."""
    chosen = kv[ids.clamp(min=0).long()]
    logits = scale * torch.einsum("shd,skd->shk", query, chosen)
    logits = logits.masked_fill((ids < 0)[:, None], -torch.inf)
    weights = torch.cat((logits, sink.expand(len(ids), -1)[..., None]), dim=2).softmax(2)
    return torch.einsum("shk,skd->shd", weights[..., :-1], chosen).flatten(1)


@pytest.mark.parametrize("packed", [False, True])
def test_megatrons_csa_and_its_gradients(packed: bool) -> None:
    """Windows and entries in one list, an empty row; of two sequences, or packed."""
    torch.manual_seed(0)
    wide: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    query, kv, sink = (
        torch.randn(3, 2, 4, 40, **wide),
        torch.randn(7, 2, 40, **wide),
        torch.randn(4, **wide),
    )
    ids = torch.randint(-1, 14, (6, 5), dtype=torch.int32)
    ids[2] = -1
    flat = query.flatten(0, 1), kv.flatten(0, 1)
    operands = flat if packed else (query, kv)
    got = megatron.csa_sparse_attn(*operands, sink, ids, 0.3, is_thd=packed)
    assert got.shape == ((6, 160) if packed else (3, 2, 160))
    expected = csa_by_torch(*flat, sink, ids, 0.3)
    assert_close(got.reshape(6, 160).detach(), expected.detach(), 1e-11)
    dout = torch.randn_like(expected)
    learned = query, kv, sink
    ours = torch.autograd.grad(got, learned, dout.view_as(got), retain_graph=packed)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, learned, dout), strict=True):
        assert_close(mine, theirs, 1e-11)
    lengths = torch.tensor([5, 3, 0, 1, 5, 2], dtype=torch.int32)
    cut = torch.where(torch.arange(5) < lengths[:, None], ids, -1)
    short = megatron.csa_sparse_attn(*operands, sink, ids, 0.3, lengths, is_thd=packed)
    assert_close(
        short.reshape(6, 160).detach(), csa_by_torch(*flat, sink, cut, 0.3).detach(), 1e-11
    )
    with pytest.raises(NotImplementedError, match="indexer_topk: expected 0; got 4"):
        megatron.csa_sparse_attn(*operands, sink, ids, 0.3, None, 4, packed)


def test_megatrons_csa_takes_the_function_where_its_signature_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def known(
        query, kv, attn_sink, topk_idxs, softmax_scale, topk_length=None, indexer_topk=0,
        is_thd=False,
    ):  # fmt: skip
        """Megatron's, in its branch dev."""

    module = stub(monkeypatch, CSA, csa_sparse_attn=known)
    megatron.register_csa()
    megatron.register_csa()
    assert module.csa_sparse_attn is megatron.csa_sparse_attn
    module.csa_sparse_attn = lambda query, kv, other: None
    with pytest.raises(
        NotImplementedError, match=r"csa_sparse_attn\(query, kv, other\) is not known"
    ):
        megatron.register_csa()
    monkeypatch.delitem(sys.modules, CSA)
    monkeypatch.delattr(sys.modules[CSA.rpartition(".")[0]], "csa")
    with pytest.raises(NotImplementedError, match="no CSA in this version"):
        megatron.register_csa()


# SGLang


def test_sglangs_sparse_prefill() -> None:
    """A topk_length of other rows is left out, as SGLang does."""
    torch.manual_seed(1)
    q, cache = torch.randn(3, 5, 576), torch.randn(20, 1, 576)
    cache[12:] = torch.nan
    table = torch.tensor([[0, 3, -1], [5, 5, 13], [-1, 2, 4]], dtype=torch.int32)
    rows = [[0, 3], [5, 5], [2, 4]]
    expected, _ = attention(q, cache[:, 0], rows, 0.1)
    lengths = torch.tensor([3, 2, 3], dtype=torch.int32)
    assert_close(sglang.forward(None, q, cache, 512, table, 0.1, lengths), expected, 1e-5)
    table[1, 2] = -1
    assert_close(sglang.forward(None, q, cache, 512, table, 0.1, lengths[:2]), expected, 1e-5)


def test_sglangs_method_is_replaced_where_its_plugins_name_flashdsa(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: list[Any] = []

    class Backend:
        def _forward_flashmla_sparse(
            self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None,
            attn_sink=None,
        ):  # fmt: skip
            """SGLang's."""

    stub(monkeypatch, "sglang.srt.layers.attention.dsa_backend", DeepseekSparseAttnBackend=Backend)
    stub(
        monkeypatch,
        "sglang.srt.plugins.hook_registry",
        HookRegistry=SimpleNamespace(register=lambda *arguments: registered.append(arguments)),
        HookType=SimpleNamespace(REPLACE="replace"),
    )
    for named, expected in (("", 0), ("other", 0), ("other, flashdsa", 1)):
        monkeypatch.setenv("SGLANG_PLUGINS", named)
        sglang.register()
        assert len(registered) == expected
    assert registered == [(sglang.TARGET, sglang.forward, "replace")]
    with pytest.raises(NotImplementedError, match="_forward_flashmla_sparse"):
        sglang.require_known(("self", "q"))
