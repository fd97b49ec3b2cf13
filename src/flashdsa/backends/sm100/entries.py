"""Compressed entries on Blackwell GPUs, of torch's operations."""

from __future__ import annotations

from functools import partial

from flashdsa.backends.cpu import entries
from flashdsa.backends.runner import by_torch

bind = partial(by_torch, entries.forward)
bind_backward = partial(by_torch, entries.backward)
