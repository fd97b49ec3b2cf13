"""A test of reverse_cute.py that needs no GPU."""

import torch
from cutlass.cute.runtime import from_dlpack
from reverse_cute import reverse

import ptxemu.cutedsl


def test_blocks_are_turned_around() -> None:
    x = torch.arange(128, dtype=torch.int32)
    y = torch.zeros_like(x)
    with ptxemu.cutedsl.emulate(arch="sm_100a"):
        reverse(from_dlpack(x), from_dlpack(y))
    # Leaving the context raises HazardError if it found anything.
    assert torch.equal(y, x.view(2, 64).flip(1).view(-1))
