"""Meta tensors: results and gradients have the shapes, dtypes and strides of the CPU's."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import flashdsa
from flashdsa.errors import ArgumentValueError
from tests.ops.inputs import small_calls
from tests.ops.test_gradients import DIFFERENTIABLE
from workbench.public_calls import Call

CALLS = {name: call for name, call in small_calls().items() if not name.startswith("bind")}


def described(value: Any) -> Any:
    """A tensor's form, without its device; others as they are."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride() if value.numel() else None
    return value


def outcome(call: Call, device: str, differentiated: bool) -> tuple[Any, ...]:
    """Forms of the results, what is written and, if asked for, of gradients."""
    arguments = pytree.tree_map_only(
        Tensor, lambda x: x.detach().clone().to(device), dict(call.arguments)
    )
    leaves = [
        x.requires_grad_()
        for x in pytree.tree_leaves(arguments)
        if differentiated and isinstance(x, Tensor) and x.is_floating_point() and x.itemsize > 1
    ]
    found = call.function(**arguments)
    tensors = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
    assert all(x.device.type == device for x in tensors)
    gradients: tuple[Tensor | None, ...] = ()
    if differentiated:
        wanted = [x for x in tensors if x.requires_grad]
        ones = [torch.ones_like(x) for x in wanted]
        gradients = torch.autograd.grad(wanted, leaves, ones, allow_unused=True)
        assert any(x is not None for x in gradients)
    return tuple(described(x) for x in (*pytree.tree_leaves(found), *gradients))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_meta_tells_what_the_cpu_would_return(name: str) -> None:
    call = CALLS[name]
    assert outcome(call, "meta", False) == outcome(call, "cpu", False)
    if name in DIFFERENTIABLE:
        assert outcome(call, "meta", True) == outcome(call, "cpu", True)


@pytest.mark.parametrize("name", CALLS)
def test_one_tensor_on_another_device_is_named(name: str) -> None:
    """Itself or, of the tensor that says the call's device, one of the others."""
    flat, tree = pytree.tree_flatten(dict(CALLS[name].arguments))
    paths = [path for path, _ in pytree.tree_flatten_with_path(dict(CALLS[name].arguments))[0]]
    tensors = [number for number, x in enumerate(flat) if isinstance(x, Tensor)]
    for number in tensors if len(tensors) > 1 else ():
        changed = [x.to("meta") if at == number else x for at, x in enumerate(flat)]
        with pytest.raises(ArgumentValueError) as raised:
            CALLS[name].function(**pytree.tree_unflatten(changed, tree))
        said, own = str(raised.value), paths[number][0].key + pytree.keystr(paths[number][1:])
        others = f"expected device meta (that of {own}); got cpu"
        assert said.startswith(f"{own}: expected device cpu") or others in said


def test_parts_on_another_device_are_named() -> None:
    outs, lses = [torch.zeros(2, 3, 4)] * 2, [torch.zeros(2, 3)] * 2
    for wrong, place in product(("outs", "lses"), range(2)):
        given = {"outs": [*outs], "lses": [*lses]}
        given[wrong][place] = given[wrong][place].to("meta")
        with pytest.raises(ArgumentValueError, match=r"^(outs|lses): expected device (cpu|meta)"):
            flashdsa.merge_attention(**given)
