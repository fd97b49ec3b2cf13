"""Every differentiable public function: gradcheck in float64, and what 16 bits may round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flashdsa.errors import ArgumentTypeError, DoubleBackwardError, UnsupportedError
from flashdsa.ops import OPERATIONS
from tests.ops.inputs import small_calls
from tests.support.subtests import CaseLoop
from workbench.public_calls import Call

DIFFERENTIABLE = {
    "sparse_mla_fwd", "sparse_mla_fwd, rows", "sparse_mla_fwd, 16 heads", "sparse_mla_fwd, decode",
    "sparse_mla_fwd, int64", "sparse_mla_fwd, two sources", "sparse_mla", "sparse_mla, two sources",
    "lse_to_base2", "lse_from_base2", "lse_for_merge", "indexer_scores", "indexer_kl",
    "indexer_kl_loss", "indexer_kl_loss_dense", "fake_quantize_index", "compress_kv", "rotate_tail",
}  # fmt: skip
CONSTANTS = {
    "indexer_kl": {"target"},
    "indexer_kl_loss": {"q", "kv", "lse"},
    "indexer_kl_loss_dense": {"q", "k", "lse"},
    "compress_kv": {"rotation[0]", "rotation[1]"},
}
"""Arguments that no gradient flows to."""
STRAIGHT_THROUGH = {"fake_quantize_index"}
"""Functions whose gradient is not meant to be their derivative."""


class InFloat64:
    """A call in float64 as a function of its floating arguments, the leaves."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.flat, self.tree = pytree.tree_flatten(dict(call.arguments))
        named, _ = pytree.tree_flatten_with_path(dict(call.arguments))
        paths = [pytree.keystr(path) for path, _ in named]
        self.places = {
            path[2:].replace("']", ""): number
            for number, (path, x) in enumerate(zip(paths, self.flat, strict=True))
            if isinstance(x, Tensor) and x.is_floating_point() and x.itemsize > 1
        }

    def leaves(self) -> list[Tensor]:
        """New ones."""
        return [self.flat[n].detach().double().requires_grad_() for n in self.places.values()]

    def __call__(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """The results that gradients flow from."""
        flat: list[Any] = list(self.flat)
        for number, leaf in zip(self.places.values(), leaves, strict=True):
            flat[number] = leaf
        found = self.call.function(**pytree.tree_unflatten(flat, self.tree))
        results = [found] if isinstance(found, Tensor) else found or ()
        return tuple(x for x in results if x.requires_grad)


def gradients(function: InFloat64, leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """Of the leaves that have one, by name; nothing of what is refused or has none."""
    try:
        results = function(*leaves)
        if not results:
            return {}
        ones = [torch.ones_like(x) for x in results]
        found = torch.autograd.grad(results, leaves, ones, allow_unused=True)
    except (UnsupportedError, DoubleBackwardError, ArgumentTypeError):
        return {}
    return {n: x for n, x in zip(function.places, found, strict=True) if x is not None}


def test_every_differentiable_function_has_its_derivative(subtests: CaseLoop) -> None:
    """Also where a later function has no gradient, which gradcheck tries."""
    differentiable = set()
    for name, call in small_calls().items():
        if call.written or name.startswith("bind"):
            continue
        with subtests.test(name):
            function = InFloat64(call)
            leaves = function.leaves()
            found = gradients(function, leaves)
            if not found:
                continue
            differentiable.add(name)
            assert function.places.keys() - found.keys() == CONSTANTS.get(name, set())
            if name not in STRAIGHT_THROUGH:
                for place, leaf in zip(function.places, leaves, strict=True):
                    leaf.requires_grad_(place in found)
                assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert differentiable == DIFFERENTIABLE
    operations = {name for name, spec in OPERATIONS.items() if spec.gradient is not None}
    assert operations <= differentiable
