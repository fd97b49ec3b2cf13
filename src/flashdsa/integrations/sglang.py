"""SGLang >= 0.5.23: its sparse prefill through flashdsa, by SGLang's plugins.

    SGLANG_PLUGINS=flashdsa python -m sglang.launch_server ... --dsa-prefill-backend flashmla_sparse

SGLang finds the entry point by itself. As it loads every plugin there is where SGLANG_PLUGINS is
not set, this one does nothing unless it is named there. Tried by contract only: the signature that
is replaced, and the function on tensors; no server was run.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.ops.attention import sparse_mla_fwd

NAME = "flashdsa"
TARGET = (
    "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_flashmla_sparse"
)
"""The method that is replaced."""
PARAMETERS = (
    "self",
    "q_all",
    "kv_cache",
    "v_head_dim",
    "page_table_1",
    "sm_scale",
    "topk_length",
    "attn_sink",
)
"""Parameters of the method in the versions that are known here."""


def register() -> None:
    """The entry point: replace SGLang's FlashMLA prefill where SGLANG_PLUGINS names flashdsa.

    Raises:
        UnsupportedError: the method has other parameters than the known ones.
    """
    named = os.environ.get("SGLANG_PLUGINS", "")
    if NAME not in [part.strip() for part in named.split(",")]:
        return
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    method = DeepseekSparseAttnBackend._forward_flashmla_sparse
    require_known(tuple(inspect.signature(method).parameters))
    HookRegistry.register(TARGET, forward, HookType.REPLACE)


def require_known(parameters: tuple[str, ...]) -> None:
    """Raise UnsupportedError for a method with other parameters."""
    if parameters != PARAMETERS:
        raise UnsupportedError(
            f"sglang: _forward_flashmla_sparse({', '.join(parameters)}) is not known here; "
            f"expected ({', '.join(PARAMETERS)})"
        )


def forward(
    backend: Any,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    page_table_1: Tensor,
    sm_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> Tensor:
    """Replace `_forward_flashmla_sparse`; any number of heads, without padding.

    Args:
        backend: SGLang's, not used.
        q_all: (T, H, 576). kv_cache: (N, 1, 576). page_table_1: (T, topk) int32, rows of kv_cache.
        topk_length: (T,) int32; one of another length is left out, as SGLang does.

    Returns:
        (T, H, v_head_dim).
    """
    if topk_length is not None and len(topk_length) != len(q_all):
        topk_length = None
    return sparse_mla_fwd(
        q_all,
        kv_cache,
        page_table_1,
        d_v=v_head_dim,
        sm_scale=sm_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
    )[0]
