"""torchtitan's way to transformers' models: its attention and masks, its classes, FSDP2.

torchtitan 0.3 itself is not needed: what it does to a model is done here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers >= 5.17")

from flashdsa.integrations.transformers import disable, enable  # noqa: E402
from tests.integrations import test_transformers as small  # noqa: E402

THEIRS = "flex_torchtitan"
BEGINS = (0, 20)
"""First tokens of the second sequence's documents; the first has one."""


class Module(torch.nn.Module):
    """The class that torchtitan puts before each module's own."""


def theirs(*_: Any, **__: Any) -> None:
    """Stands for its attention, which takes no notice of the chosen keys."""
    raise AssertionError("flashdsa takes the place of torchtitan's attention")


def build(kind: str) -> Any:
    """A model of transformers, which knows torchtitan's attention."""
    transformers.AttentionInterface._global_mapping[THEIRS] = theirs
    return small.build(kind).train()


def convert(model: torch.nn.Module) -> None:
    """Each module below gets a class of the same name that was made elsewhere."""
    for child in model.children():
        kind = type(child)
        if not issubclass(kind, Module):
            child.__class__ = type(kind.__name__, (Module, kind), {})
        convert(child)


def inputs() -> dict[str, Tensor]:
    """Tokens, positions that begin anew with each document, and its additive mask (B, 1, S, S)."""
    torch.manual_seed(1)
    position = torch.arange(small.LENGTH)
    document = torch.stack([position * 0, (position >= BEGINS[1]).long()])
    seen = (position[:, None] >= position) & (document[:, :, None] == document[:, None])
    return {
        "input_ids": torch.randint(1, 96, (2, small.LENGTH)),
        "position_ids": position - document * BEGINS[1],
        "attention_mask": torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None],
    }


def eager(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A step by transformers' own code, before torchtitan sets its attention."""
    model.config._attn_implementation = "eager"
    found = step(model)
    model.config._attn_implementation = THEIRS
    return found


def step(model: Any, rows: slice = slice(None)) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and every parameter's gradient."""
    model.zero_grad()
    logits = model(**{name: x[rows] for name, x in inputs().items()}).logits
    torch.manual_seed(2)
    (logits * torch.randn(2, *logits.shape[1:])[rows]).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one.clone())
        for name, one in found.items()
    }
    return logits.detach(), whole


@pytest.mark.parametrize("indexer", ["model", "exact"])
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_an_enabled_model_takes_its_mask_and_its_classes(kind: str, indexer: str) -> None:
    model = build(kind)
    expected, gradients = eager(model)
    for _ in range(2):
        enable(model, indexer=indexer)
        got, ours = step(model)
        assert small.error(got, expected) < 3e-6
        assert small.worst(ours, gradients) < 1e-5
        disable(model)
        assert model.config._attn_implementation == THEIRS
        convert(model)


def small_in_shards() -> None:
    """A rank has a sequence, and half of each layer's parameters: tests/examples/test_two_ranks.py
    runs it on two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build("glm_moe_dsa")
    expected, gradients = eager(model)
    enable(model, indexer="exact")
    convert(model)
    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    got, ours = step(model, slice(rank, rank + 1))
    assert small.error(got, expected[rank : rank + 1]) < 3e-6
    assert small.worst({name: 2 * one for name, one in ours.items()}, gradients) < 1e-5
