"""Nested and sparse tensors are refused by name, whatever argument they are given as."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from flashdsa.errors import ArgumentTypeError
from tests.support.hopper_gpu import HOPPER_GPU
from tests.support.subtests import CaseLoop
from workbench.public_calls import public_calls

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state"),
]


def rows(like: Tensor) -> list[Tensor]:
    dtype = torch.float32 if like.dtype == torch.float8_e4m3fn else like.dtype  # torch has none
    return [torch.zeros(size, dtype=dtype, device=like.device) for size in (1, 2)]


def sparse_csr(like: Tensor) -> Tensor:
    """Of the same shape where it is a matrix."""
    shape = like.shape if like.dim() == 2 else (2, 3)
    return torch.zeros(shape, device=like.device).to_sparse_csr().to(like.dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nested": lambda like: torch.nested.nested_tensor(rows(like)),
    "jagged": lambda like: torch.nested.nested_tensor(rows(like), layout=torch.jagged),
    "sparse_coo": lambda like: like.float().to_sparse().to(like.dtype),
    "sparse_csr": sparse_csr,
}
LAYOUT_CALLS = public_calls("cpu")
ONCE = [name for name in LAYOUT_CALLS if "," not in name]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=HOPPER_GPU)])
def test_other_layouts_are_refused_by_name(
    subtests: CaseLoop, new_calls: Callable[[], None], device: str
) -> None:
    """In a first call, and where a right one was served twice."""
    for name, layout in product([*ONCE, "sparse_mla_fwd, buffers"], LAYOUTS):
        new_calls()
        with subtests.test(f"{layout}, {name}"):
            call = public_calls(device)[name]
            for turn in range(2):
                for argument in call.tensors:
                    wrong = LAYOUTS[layout](call.arguments[argument])
                    for _ in range(2):
                        with pytest.raises(
                            ArgumentTypeError, match=f"^{argument}: expected a dense tensor"
                        ):
                            call.function(**{**call.arguments, argument: wrong})
                if not turn:
                    call()
                    call()
