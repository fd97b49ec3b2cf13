"""The layers of the demo: causal, really selecting, and equal to dense where it must be."""

from __future__ import annotations

import builtins
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from examples.demo import text
from examples.demo.model import NEAR, Attention, ByteModel, dense, dense_logits
from examples.demo.train import FORMS, captured, sparse_stage_loss, warm_up_loss
from examples.demo.v4 import RATIO

WINDOW, NUM_QUERIES, TOPK = 200, 48, 32
KEYS = {"v32": WINDOW, "v4": WINDOW // RATIO}
QUERY = torch.arange(WINDOW - NUM_QUERIES, WINDOW)[:, None]
ROWS = torch.arange(NUM_QUERIES)


class Run(NamedTuple):
    model: ByteModel
    logits: Tensor
    hidden: Tensor
    attention: Attention


def run(form: str, topk: int = TOPK, changed: int = 0) -> Run:
    """The same model and window each time, but for the last byte."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = ByteModel(2, NUM_QUERIES, topk, "auto", FORMS[form])
    tokens = torch.randint(256, (WINDOW,), generator=torch.Generator().manual_seed(4))
    tokens[-1] = (tokens[-1] + changed) % 256
    return Run(model, *model(tokens))


@pytest.fixture(scope="module", params=list(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def sparse(form: str) -> Run:
    return run(form)


def test_choices_are_causal_distinct_and_a_real_selection(sparse: Run) -> None:
    ordered, end = sparse.attention.indices.sort(dim=-1).values, sparse.attention.ends[:, None]
    assert ordered.shape == (NUM_QUERIES, TOPK)
    assert bool((ordered >= 0).all()) and bool((ordered < end).all())
    assert bool((ordered.diff(dim=-1) > 0).all())
    newest = end - torch.arange(TOPK, 0, -1)
    assert not bool((ordered == newest).all(dim=-1).any())
    assert len(torch.unique(ordered, dim=0)) > 1  # queries choose differently


def test_the_last_byte_changes_only_the_last_query(form: str, sparse: Run) -> None:
    before, after = sparse.logits, run(form, changed=1).logits
    assert torch.allclose(before[:-1], after[:-1], rtol=0, atol=1e-5)
    assert not torch.allclose(before[-1], after[-1], rtol=0, atol=1e-2)


def test_fp8_choices_follow_the_float_scores(sparse: Run) -> None:
    one = sparse.attention
    scores = torch.einsum("shk,tk->sht", one.q_index, one.k_index).relu()
    scores = torch.einsum("sht,sh->st", scores, one.weights)
    scores = scores.masked_fill(torch.arange(len(one.kv)) >= one.ends[:, None], -torch.inf)
    wanted = torch.zeros(scores.shape, dtype=torch.bool)
    wanted.scatter_(1, scores.topk(TOPK).indices, True)
    assert wanted.gather(1, one.indices.long()).float().mean() > 0.9


def test_choosing_everything_is_dense_attention_forward_and_backward(form: str) -> None:
    model, logits, hidden, attention = run(form, topk=KEYS[form])
    _, attended = dense(attention)
    assert (attention.out.float() - attended).norm() < 2e-2 * attended.norm()
    learned = [p for name, p in model.named_parameters() if "indexer" not in name]
    found = torch.autograd.grad(logits.square().mean(), learned, retain_graph=True)
    expected = torch.autograd.grad(model.read_out(hidden, attended).square().mean(), learned)
    for mine, wanted in zip(found, expected, strict=True):
        assert (mine - wanted).norm() < 5e-2 * wanted.norm()


def test_both_losses_of_the_indexer_agree_on_everything_and_teach_it_alone(form: str) -> None:
    model, *_, attention = run(form, topk=KEYS[form])
    dense, sparse = warm_up_loss(attention, ROWS), sparse_stage_loss(attention, ROWS, "auto")
    assert sparse.item() == pytest.approx(dense.item(), rel=2e-2)
    for loss in (dense, sparse):
        model.zero_grad()
        loss.backward(retain_graph=True)
        taught = {name for name, p in model.named_parameters() if p.grad is not None}
        assert taught == {name for name, _ in model.named_parameters() if "indexer" in name}


def test_captured_mass_of_uniform_attention() -> None:
    visible = torch.arange(WINDOW) <= QUERY
    probability = visible / visible.sum(dim=-1, keepdim=True)
    first = visible & (torch.arange(WINDOW) < TOPK)
    shares = captured(first, probability, QUERY.flatten() + 1, TOPK)
    assert [float(share) for share in shares] == pytest.approx(
        [(TOPK / (QUERY + 1)).mean().item()] * 4
    )


def test_dense_attention_sees_no_future(form: str, sparse: Run) -> None:
    weights = dense_logits(sparse.attention, torch.tensor([0, NUM_QUERIES - 1])).softmax(-1)
    first, keys = WINDOW - NUM_QUERIES, KEYS[form]
    assert bool((weights[0, :, (first + 1) * keys // WINDOW : keys] == 0).all())
    assert bool((weights[1, :, :keys] > 0).all())
    if form == "v4":  # the near bytes, up to each query's own, and the sink
        for row, own in ((0, first), (1, WINDOW - 1)):
            seen = (weights[row, :, keys:] > 0).all(dim=0).nonzero().flatten().tolist()
            assert seen == [*range(own + 1 - NEAR, own + 1), WINDOW]


def paragraphs(corpus_bytes: torch.Tensor) -> set[str]:
    decoded = bytes(corpus_bytes.tolist()).decode("utf-8", errors="replace")
    return {" ".join(paragraph.split()) for paragraph in decoded.split("\n\n")} - {""}


def test_text_is_large_and_the_same_every_time() -> None:
    first, second = text.load_text(), text.load_text()
    for one, again, least in zip(first, second, (50_000, 5_000), strict=True):
        assert len(one) > least
        assert torch.equal(one, again)


def test_no_paragraph_is_in_both_halves() -> None:
    train, held_out = text.load_text()
    assert not paragraphs(train) & paragraphs(held_out)


def test_missing_sources_fall_back_to_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_builtins(name: str) -> ModuleType:
        if name != "builtins":
            raise ModuleNotFoundError(name)
        return builtins

    monkeypatch.setattr(text.importlib, "import_module", only_builtins)
    train, held_out = text.load_text()
    assert len(train) > 20_000
    assert len(held_out) > 2_000
