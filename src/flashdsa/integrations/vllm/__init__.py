"""vLLM >= 0.33: sparse MLA attention backends, found by vLLM's plugins.

    vllm serve ... --attention-backend FLASHDSA_MLA_SPARSE
    vllm serve ... --attention-backend FLASHDSA_MLA_SPARSE_INDEXER
    FLASHDSA_VLLM_V4=1 vllm serve ...

The first serves attention, the second the indexer's top-k, too, the third attention of DeepSeek-V4
and V4.1. docs/guides/serving.md says what was tried.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from flashdsa.ops.attention import PACKED, sparse_mla_fwd
from flashdsa.ops.merge import lse_for_merge
from flashdsa.problem import D_QK, D_V
from flashdsa.settings import VLLM_V4

NAME = "FLASHDSA_MLA_SPARSE"
INDEXER_NAME = "FLASHDSA_MLA_SPARSE_INDEXER"
KNOWN = "0.33"
"""Release of vLLM that is known and was tried, the lowest and the highest."""
LOGGER = "vllm.flashdsa"
"""Logger of the lines that a server's log is to have: vLLM shows those of its own hierarchy."""
CLASSES = {
    NAME: "flashdsa.integrations.vllm.backend.FlashDsaMLASparseBackend",
    INDEXER_NAME: "flashdsa.integrations.vllm.backend.FlashDsaMLASparseIndexerBackend",
}


def register() -> None:
    """The entry point, run in each process of any vLLM: make the backends' names known, and serve
    DeepSeek-V4's layers where `VLLM_V4` is set.

    A vLLM that does not take the names is one warning, as most servers use none of them; one that
    was told to says that it does not know the name.

    Raises:
        UnsupportedError, ImportError: `VLLM_V4` is set, and this vLLM or its kernels are missing.
    """
    try:
        for name in CLASSES:
            member(name)
    except Exception as error:  # vLLM would end with it
        from flashdsa import __version__
        from flashdsa.integrations import start

        start.say(
            LOGGER,
            f"flashdsa {__version__} has no backend for vLLM {installed_version()}; {KNOWN} is "
            f"known: {type(error).__name__}: {error}",
            logging.WARNING,
        )
    if os.environ.get(VLLM_V4, "0") != "0":
        from flashdsa.integrations.vllm import v4

        v4.install()


def member(name: str) -> Any:
    """vLLM's enum member of a backend, which is made known unless it is.

    Its pickle calls this function: a spawned process, as each engine of `vllm serve`, reads its
    configuration before it loads plugins.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if name not in AttentionBackendEnum.__members__:
        register_backend(name, CLASSES[name])
        AttentionBackendEnum[name].__reduce_ex__ = lambda protocol: (member, (name,))
    return AttentionBackendEnum[name]


def installed_version() -> str:
    """Return vLLM's version."""
    import vllm

    return str(getattr(vllm, "__version__", "of no version"))


def say_untried() -> None:
    """Warn, once, of a vLLM other than the one that is known."""
    from flashdsa.integrations import start

    version = installed_version()
    found = re.match(r"\d+\.\d+(?!\d)", version)
    if found is None or found.group() != KNOWN:
        start.say(
            LOGGER, f"flashdsa was tried with vLLM {KNOWN}; {version} is installed", logging.WARNING
        )


def join(latent: Tensor, rope: Tensor, queries: Tensor) -> Tensor:
    """Write the columns of q to a buffer, by vLLM's kernel where it has one.

    Args:
        latent: (T, H, 512). rope: (T, H, 64), or (T, H, 0) without RoPE.
        queries: (T or more, H, 576), or 512 columns without RoPE; columns that q lacks become 0.

    Returns:
        The buffer's first T rows, or `latent` if it has all columns.
    """
    if latent.shape[-1] == queries.shape[-1]:
        return latent
    found = queries[: len(latent)]
    if latent.is_cuda and rope.shape[-1] == D_QK - D_V:
        from vllm import _custom_ops as ops

        ops.concat_mla_q(latent, rope, found)
        return found
    found[..., :D_V] = latent
    found[..., D_V:] = rope if rope.shape[-1] else 0
    return found


def attend(
    q: Tensor,
    rows: Tensor,
    topk_indices: Tensor,
    valid_counts: Tensor | None,
    sm_scale: float,
    *,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Compute the backends' attention.

    Args:
        q: (T, H, 576); 512 columns without RoPE.
        rows: (N, 576) rows of the cache, as the ids count them; (N, 512) without RoPE; or
            (N, 656) uint8, packed rows, whose RoPE columns are zeros without RoPE.
        topk_indices: (T, topk) int32, the first `valid_counts` (T,) of each row in use; -1 is none.

    Returns:
        out (T, H, 512), lse (T, H) fp32, the natural logarithm, -inf for an empty row, or None.
    """
    columns = D_QK if rows.dtype in PACKED else rows.shape[-1]
    if q.shape[-1] < columns:
        q = pad(q, (0, columns - q.shape[-1]))
    out, lse = sparse_mla_fwd(q, rows, topk_indices, sm_scale=sm_scale, topk_length=valid_counts)
    return out, lse_for_merge(lse) if with_lse else None
