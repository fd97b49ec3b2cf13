"""Megatron-Core's hooks on tensors, without Megatron; test_contracts.py runs Megatron itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.integrations import megatron
from flashdsa.integrations.megatron import csa, dsa
from tests.distributed.ranks import run_ranks
from tests.support.formulas import assert_close, attention, index_scores
from tests.support.megatron_calls import (
    CONFIG,
    LATENT,
    ONE_RANK,
    SCALE,
    TOPK,
    half_of_the_heads,
    heads,
    problem,
    whole,
)
from tests.support.stubs import stub


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
    """A table, a check that other names still pass through, and the choices of an argument."""

    @dataclass
    class TransformerConfig:
        dsa_kernel_backend: Literal["none", "cudnn"] = "none"

    # Annotations of this module are strings, those of Megatron's are not.
    field = TransformerConfig.__dataclass_fields__["dsa_kernel_backend"]
    field.type = Literal["none", "cudnn"]
    asked: list[str] = []
    configs = stub(
        monkeypatch,
        "megatron.core.transformer.transformer_config",
        TransformerConfig=TransformerConfig,
        _validate_dsa_kernel_backend_dependencies=asked.append,
    )
    table: dict[str, str] = {"cudnn": "cudnn"}
    kernels = stub(
        monkeypatch,
        "megatron.core.transformer.experimental_attention_variant.dsa_kernels",
        _BACKEND_MODULE_NAME_BY_BACKEND=table,
    )
    megatron.register()
    megatron.register()
    assert import_module(table["flashdsa"]) is megatron
    for name in ("flashdsa", "cudnn", "other"):
        configs._validate_dsa_kernel_backend_dependencies(name)
    assert asked == ["cudnn", "other"]
    assert get_args(field.type) == ("none", "cudnn", "flashdsa")
    del table["flashdsa"], configs.TransformerConfig.__dataclass_fields__["dsa_kernel_backend"]
    with pytest.raises(NotImplementedError, match="megatron-core"):
        megatron.register()
    assert list(table) == ["cudnn"]
    del kernels._BACKEND_MODULE_NAME_BY_BACKEND
    with pytest.raises(NotImplementedError, match="megatron-core"):
        megatron.register()


def seen_keys(x: dict[str, Any]) -> list[list[list[int]]]:
    """Of each sequence and query the keys that it sees."""
    ends = x["ends"].clamp(max=8)
    return [[list(range(a, b)) for a, b in zip(x["starts"], ends, strict=True)] for _ in range(2)]


def best_keys(x: dict[str, Any]) -> list[list[list[int]]]:
    """Those with the best scores, by formula."""
    found = []
    for b, seen in enumerate(seen_keys(x)):
        scores = index_scores(x["q"][:, b], x["k"][:, b], torch.ones(8), x["weights"][:, b])
        best = [sorted(keys, key=lambda t, s=s: -scores[s, t].item())[:TOPK] for s, keys in
                enumerate(seen)]  # fmt: skip
        found.append([sorted(keys) for keys in best])
    return found


def loss_by_formula(
    x: dict[str, Any], y: dict[str, Any], keys: list[list[list[int]]], weight: Tensor
) -> Tensor:
    """The indexer's loss over `keys`, differentiable by torch; `weight` (2, 6) of the queries."""
    total = torch.zeros((), dtype=torch.float64)
    for b in range(2):
        for s in range(6):
            chosen = keys[b][s]
            if not chosen:
                continue
            logits = SCALE * y["query"][s, b].double() @ y["key"][chosen, b, 0].double().T
            target = logits.softmax(1).mean(0).detach()
            dots = (x["q"][s, b].double() @ x["k"][chosen, b].double().T).relu()
            log_prediction = (x["weights"][s, b].double() @ dots).log_softmax(0)
            total = total + weight[b, s] * (target * (target.log() - log_prediction)).sum()
    return total


def test_megatrons_choice_of_keys() -> None:
    x = problem()
    answer = megatron.run_fused_qk_topk(**x, block_size=8192, cp_size=1)
    assert answer is not None
    ids, lengths = answer
    assert ids.shape == (2, 6, TOPK) and not ids.requires_grad
    got = [[sorted(row[row >= 0].tolist()) for row in of] for of in ids]
    assert got == best_keys(x)
    assert lengths.tolist() == [[len(row) for row in of] for of in got]
    x["index_topk"] = 20
    every, _ = megatron.run_fused_qk_topk(**x) or pytest.fail("declined")
    assert every.shape == (2, 6, 8)


WEIGHTS = {
    "mean": ({}, torch.full((2, 6), 0.5 / 12)),
    "sum": ({"calculate_per_token_loss": True}, torch.full((2, 6), 0.5)),
    "some rows": (
        {"query_valid_rows": torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.bool)},
        torch.tensor([1.0, 1, 1, 1, 1, 0]).expand(2, 6) * 0.05,
    ),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_megatrons_loss_and_its_gradients(kind: str) -> None:
    x, y = problem(), heads()
    options, weight = WEIGHTS[kind]
    answer = megatron.run_fused_qk_topk_with_loss(
        **x, **y, **options, config=CONFIG, softmax_scale=SCALE, loss_coeff=0.5,
        pg_collection=ONE_RANK, block_size=8192,
    )  # fmt: skip
    assert answer is not None
    ids, _, loss = answer
    assert [[sorted(row[row >= 0].tolist()) for row in of] for of in ids] == best_keys(x)
    require_loss(loss, loss_by_formula(x, y, best_keys(x), weight), x)


def require_loss(loss: Tensor, expected: Tensor, x: dict[str, Any]) -> None:
    """Hold the loss and the gradients of q, k and weights against the formula's."""
    learned = x["q"], x["k"], x["weights"]
    assert_close(loss.detach(), expected.detach(), 1e-5)
    ours = torch.autograd.grad(loss, learned, retain_graph=True)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, learned), strict=True):
        assert_close(mine, theirs, 1e-5)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_megatrons_whole_attention(is_sparse: bool) -> None:
    """As its parts, with the loss over the chosen keys or over all that a query sees."""
    x, y = problem(), heads()
    up = torch.randn(4, 7, LATENT, requires_grad=True)
    given = whole(x, y, sparse_loss=is_sparse, up_v_weight=up)
    answer = megatron.run_fused_dsa_attention(**given)
    ids, lengths = megatron.run_fused_qk_topk(**x) or pytest.fail("declined")
    latent = megatron.run_fused_absorbed_sparse_attention(
        y["query"], y["key"], ids, SCALE, LATENT, lengths
    )
    assert answer is not None and answer[1] is not None and latent is not None
    out, loss = answer
    expected = torch.einsum("sbhc,hdc->sbhd", latent, up).flatten(2)
    assert_close(out.detach(), expected.detach(), 1e-6)
    learned, dout = (y["query"], y["key"], up), torch.randn_like(out)
    ours = torch.autograd.grad(out, learned, dout, retain_graph=True)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, learned, dout), strict=True):
        assert_close(mine, theirs, 1e-5)
    keys = best_keys(x) if is_sparse else seen_keys(x)
    require_loss(loss, loss_by_formula(x, y, keys, torch.full((2, 6), 0.5 / 12)), x)
    assert torch.autograd.grad(loss, learned, allow_unused=True) == (None, None, None)
    for choices in ({"loss_coeff": 0.0}, {}):
        with torch.set_grad_enabled(bool(choices)):
            again = megatron.run_fused_dsa_attention(**given | choices)
        assert again is not None and again[1] is None and torch.equal(again[0], out)


def test_megatrons_indexer_is_declined_what_is_not_served() -> None:
    """Unrectified or quantised scores, unknown arguments, other masks, sizes and dtypes."""
    x, y = problem(), heads()
    whole_again, narrow = whole(x, y), {"q": x["q"][..., :64], "k": x["k"][..., :64]}
    local = {"single_packed_thd_sequence": True, "local_packed_cp_query_len": 8}
    for change in (
        {"use_relu": False}, {"next_version": 1}, narrow, {"k": x["k"].double()}, local,
        {"weights": x["weights"][:5]}, {"ends": x["ends"][:5]}, {"k": x["k"][:, :1]},
        {"k": x["k"][:0]},
    ):  # fmt: skip
        assert megatron.run_fused_qk_topk(**x | change) is None, change
    wide = {"q": x["q"].double(), "k": x["k"].double()}
    assert megatron.run_fused_qk_topk(**x | wide) is None
    for change in (
        {"config": SimpleNamespace(kv_lora_rank=LATENT, dsa_indexer_precision="mxfp8")},
        {"absorbed_mla": False}, {"value": y["key"]}, {"up_v_weight": None},
        {"attn_mask_type": None}, {"varlen_starts": None}, {"key_positions": x["ends"]},
        {"key": y["key"].expand(-1, -1, 2, -1)}, {"query": y["query"].double()},
        {"query": y["query"][:5]}, {"use_relu": False},
    ):  # fmt: skip
        assert megatron.run_fused_dsa_attention(**whole_again | change) is None, change
    with_loss = x | y | {"config": CONFIG, "softmax_scale": SCALE, "loss_coeff": 0.5}
    for change in ({"key": y["key"][:7]}, {"use_relu": False}):
        answer = megatron.run_fused_qk_topk_with_loss(**with_loss | change, pg_collection=ONE_RANK)
        assert answer is None, change
    torch.use_deterministic_algorithms(True)
    try:
        assert megatron.run_fused_dsa_attention(**whole_again) is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_megatrons_loss_adds_the_heads_of_other_ranks(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 2, [half_of_the_heads])
    assert found == [{}, {}]


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


@pytest.mark.parametrize("asked", [False, True])
def test_attention_is_deterministic_where_torch_is_asked_to_be(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """Of both entries that have attention's gradients by themselves."""
    seen: list[bool] = []

    def noted(*given: Any, deterministic: bool, **named: Any) -> Tensor:
        seen.append(deterministic)
        return flashdsa.sparse_mla(*given, deterministic=deterministic, **named)

    for module in (csa, dsa):
        monkeypatch.setattr(module, "sparse_mla", noted)
    query, kv, ids = torch.randn(3, 1, 4, 40), torch.randn(7, 1, 40), torch.ones(1, 3, 2).int()
    torch.use_deterministic_algorithms(asked)
    try:
        megatron.csa_sparse_attn(query, kv, torch.zeros(4), ids[0], 0.3)
        megatron.run_fused_absorbed_sparse_attention(query, kv[:, :, None], ids, 0.3, 40)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [asked, asked]


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
