"""The packed index-K cache by torch on any device."""

from __future__ import annotations

from functools import partial

from flashdsa.backends.cpu import index_k_cache
from flashdsa.backends.cpu.tiling import DEVICE

write = partial(index_k_cache.write, mode=DEVICE)
read = partial(index_k_cache.read, mode=DEVICE)
