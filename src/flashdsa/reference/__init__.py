"""The oracle: every public operation in float64, plain enough to be read as its definition.

Nothing here is blocked, fused or shared with a backend; speed is no goal.  Inputs may have any
floating dtype and live on any device; outputs are float64 (or the exact integers and bytes).
"""

# ruff: noqa: F403 - a file's `__all__` says what is public

from flashdsa.reference.entries import *
from flashdsa.reference.indexer import *
from flashdsa.reference.indexer_training import *
from flashdsa.reference.packed_kv import *
from flashdsa.reference.prefill import *
from flashdsa.reference.quant import *
from flashdsa.reference.sparse_mla import *
