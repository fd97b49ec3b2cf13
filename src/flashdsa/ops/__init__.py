"""The operations: each file declares those of a family and has their public functions."""

# ruff: noqa: F403 - a family's `__all__` says what is public

from inspect import isfunction

from flashdsa.backends.catalog import registry as registry
from flashdsa.dispatch.registration import OPERATIONS as OPERATIONS
from flashdsa.ops.attention import *
from flashdsa.ops.attention_backward import *
from flashdsa.ops.blocks import *
from flashdsa.ops.bound import *
from flashdsa.ops.entries import *
from flashdsa.ops.explained import *
from flashdsa.ops.index_k_cache import *
from flashdsa.ops.indexer import *
from flashdsa.ops.indexer_loss import *
from flashdsa.ops.indexer_loss_dense import *
from flashdsa.ops.indexer_training import *
from flashdsa.ops.kv_cache import *
from flashdsa.ops.merge import *
from flashdsa.ops.prefill import *

PUBLIC = sorted({name for name, value in vars().items() if isfunction(value)} - {"isfunction"})
"""Names of the functions of `flashdsa`: those that a family names in its `__all__`."""
