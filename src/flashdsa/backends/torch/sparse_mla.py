"""Sparse MLA by torch on any device: the CPU's tiles, larger ones, whose work values do not change.

Sums are fp32 (fp64 for fp64 inputs), products those that torch's settings allow.
"""

from __future__ import annotations

from functools import partial

from flashdsa.backends.cpu import sparse_mla
from flashdsa.backends.cpu.tiling import DEVICE

forward = partial(sparse_mla.forward, mode=DEVICE)
forward_out = partial(sparse_mla.forward_out, mode=DEVICE)
backward = partial(sparse_mla.backward, mode=DEVICE)
