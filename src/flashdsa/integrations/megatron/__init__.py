"""Megatron-Core >= 0.19: DeepSeek Sparse Attention by flashdsa, as a DSA kernel backend.

    from flashdsa.integrations import megatron
    megatron.register()
    config = MLATransformerConfig(..., dsa_kernel_backend="flashdsa")

Megatron imports this module by its name and calls the hooks that it finds; what a hook declines,
Megatron computes by itself.

DeepSeek-V4's layers (CSA, in Megatron's branch dev of 2026-08) have no table of backends:
`register_csa()` puts `csa_sparse_attn` in the place of Megatron's. Layers call it for windows, for
all entries and, without the indexer's loss, for selected ones.
"""

from __future__ import annotations

import inspect
from typing import Literal, get_args, get_origin

from flashdsa.errors import UnsupportedError
from flashdsa.integrations.megatron.csa import csa_sparse_attn
from flashdsa.integrations.megatron.dsa import (
    run_fused_absorbed_sparse_attention,
    run_fused_dsa_attention,
    run_fused_qk_topk,
    run_fused_qk_topk_with_loss,
)

__all__ = [
    "NAME",
    "csa_sparse_attn",
    "register",
    "register_csa",
    "run_fused_absorbed_sparse_attention",
    "run_fused_dsa_attention",
    "run_fused_qk_topk",
    "run_fused_qk_topk_with_loss",
]

NAME = "flashdsa"
"""Name of the backend, in `TransformerConfig.dsa_kernel_backend`."""


def register() -> None:
    """Make the backend known to Megatron-Core. Call it before a configuration names it, and before
    Megatron-LM's scripts parse `--dsa-kernel-backend`.

    Megatron's check of a named backend asks for a CUDA device and for the kernels' packages; of
    this name it asks nothing, so that a CPU may name it, too.

    Raises:
        UnsupportedError: this Megatron-Core has no table of backends.
    """
    try:
        from megatron.core.transformer import transformer_config as configs
        from megatron.core.transformer.experimental_attention_variant import dsa_kernels

        modules = dsa_kernels._BACKEND_MODULE_NAME_BY_BACKEND
        check = configs._validate_dsa_kernel_backend_dependencies
        field = configs.TransformerConfig.__dataclass_fields__["dsa_kernel_backend"]
    except (ImportError, AttributeError, KeyError) as error:
        raise UnsupportedError(
            "megatron-core: no table of DSA kernel backends in this version; 0.19 and 0.20 have "
            f"one ({error})"
        ) from error
    if NAME in modules:
        return

    def check_others(backend: str) -> None:
        if backend != NAME:
            check(backend)

    modules[NAME] = __name__
    configs._validate_dsa_kernel_backend_dependencies = check_others
    if get_origin(field.type) is Literal:  # the choices of Megatron-LM's argument
        field.type = Literal[(*get_args(field.type), NAME)]


def register_csa() -> None:
    """Have Megatron's compressed sparse attention call `csa_sparse_attn` of this module.

    Raises:
        UnsupportedError: this Megatron-Core has no such attention, or another signature.
    """
    try:
        from megatron.core.transformer.experimental_attention_variant import csa
    except ImportError as error:
        raise UnsupportedError(f"megatron-core: no CSA in this version ({error})") from error
    known, own = (
        list(inspect.signature(one).parameters) for one in (csa.csa_sparse_attn, csa_sparse_attn)
    )
    if csa.csa_sparse_attn is not csa_sparse_attn and known != own:
        raise UnsupportedError(f"megatron-core: csa_sparse_attn({', '.join(known)}) is not known")
    csa.csa_sparse_attn = csa_sparse_attn
