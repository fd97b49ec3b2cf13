r"""SGLang 0.5.13 to 0.5.23: its FlashMLA attention and its indexer, by SGLang's plugins.

    SGLANG_PLUGINS=flashdsa,flashdsa_indexer sglang serve --model-path MODEL \
        --dsa-prefill-backend flashmla_sparse --dsa-decode-backend flashmla_sparse

The first name serves attention, the second the indexer's top-k. SGLang finds the entry points by
itself. As it loads every plugin there is where SGLANG_PLUGINS is not set, these do nothing unless
they are named there. docs/guides/serving.md says what was tried.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flashdsa import __version__
from flashdsa.errors import UnsupportedError
from flashdsa.integrations import start
from flashdsa.integrations.sglang.indexer import (
    INDEXER_NAME,
    LOGGER,
    choose_paged,
    choose_ragged,
    prepare_index,
)
from flashdsa.jit.user_cache import package_version
from flashdsa.ops.attention import sparse_mla_fwd
from flashdsa.row_formats import ROW_FORMATS, V32, RowFormat

NAME = "flashdsa"
BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
CHECK = "sglang.srt.server_args.ServerArgs.check_server_args"
"""Called once before a server's processes start."""
SERVED = ("flashmla_sparse", "flashmla_kv", "flashmla_auto")
"""SGLang's backends whose kernels are replaced."""
MOST_QUERIES, MANY_ROWS = 2**13, 2**17
"""Queries of a step, and rows of a cache, up to which kernels are chosen by their number."""
PARAMETERS = {
    "_forward_flashmla_sparse": (
        "self", "q_all", "kv_cache", "v_head_dim", "page_table_1", "sm_scale", "topk_length",
        "attn_sink",
    ),
    "_forward_flashmla_kv": (
        "self", "q_all", "kv_cache", "v_head_dim", "sm_scale", "layer", "metadata", "page_table_1",
    ),
    "_get_topk_paged": ("self", "forward_batch", "layer_id", "q_fp8", "weights", "metadata"),
    "_get_topk_ragged": (
        "self", "enable_dual_stream", "forward_batch", "layer_id", "q_fp8", "weights", "metadata",
        "topk_result",
    ),
}  # fmt: skip
"""Parameters of the methods that are replaced, as they are known here."""
FORMATS: dict[int, RowFormat] = {64: V32, 0: ROW_FORMATS["v32_no_rope"]}
"""Packed rows of SGLang's DSA backend, by columns of RoPE."""
LATER = ("topk_length", "attn_sink")
"""Those that 0.5.13 lacks."""


def register() -> None:
    """The entry point: replace FlashMLA's attention where SGLANG_PLUGINS names flashdsa.

    Raises:
        SystemExit: this SGLang has other methods than the known ones. SGLang logs other errors,
            and serves without the plugin.
    """
    methods = {"_forward_flashmla_sparse": forward, "_forward_flashmla_kv": forward_packed}
    if (hooks := known_hooks(NAME, BACKEND, tuple(methods))) is None:
        return
    with known_sglang(NAME):
        for name, function in methods.items():
            hooks.HookRegistry.register(f"{BACKEND}.{name}", function, hooks.HookType.REPLACE)
        hooks.HookRegistry.register(CHECK, require_served, hooks.HookType.AFTER)
        hooks.HookRegistry.register(f"{BACKEND}.__init__", prepare, hooks.HookType.AFTER)


def register_indexer() -> None:
    """The entry point: replace the indexer's top-k where SGLANG_PLUGINS names flashdsa_indexer.

    Raises:
        SystemExit: as `register`.
    """
    methods = {"_get_topk_paged": choose_paged, "_get_topk_ragged": choose_ragged}
    if (hooks := known_hooks(INDEXER_NAME, INDEXER, tuple(methods))) is None:
        return
    with known_sglang(INDEXER_NAME):
        for name, function in methods.items():
            hooks.HookRegistry.register(f"{INDEXER}.{name}", function, hooks.HookType.AROUND)
        hooks.HookRegistry.register(f"{INDEXER}.__init__", prepare_index, hooks.HookType.AFTER)


def known_hooks(plugin: str, path: str, methods: tuple[str, ...]) -> Any:
    """Return SGLang's module of hooks, or None if SGLANG_PLUGINS does not name the plugin.

    Args:
        path: the class that has the methods.

    Raises:
        SystemExit: there is no such class, or its methods are not the known ones.
    """
    named = os.environ.get("SGLANG_PLUGINS", "")
    if plugin not in [part.strip() for part in named.split(",")]:
        return None
    module, _, kind = path.rpartition(".")
    with known_sglang(plugin):
        hooks = import_module("sglang.srt.plugins.hook_registry")
        owner = getattr(import_module(module), kind)
        found = {name: inspect.signature(getattr(owner, name)) for name in methods}
    for name, signature in found.items():
        require_known(plugin, name, tuple(signature.parameters))
    return hooks


@contextmanager
def known_sglang(plugin: str) -> Iterator[None]:
    """End the start, in one line with the versions, for whatever fails inside.

    Raises:
        SystemExit: something failed.
    """
    try:
        yield
    except Exception as error:
        versions = f"flashdsa {__version__}, sglang {package_version('sglang')}"
        raise SystemExit(
            f"{plugin}: this SGLang is not known: {type(error).__name__}: {error} ({versions})"
        ) from None


def require_known(plugin: str, method: str, parameters: tuple[str, ...]) -> None:
    """End the start for a method with other parameters, in one line.

    Raises:
        SystemExit: they are other ones.
    """
    known = PARAMETERS[method]
    if parameters not in (known, tuple(one for one in known if one not in LATER)):
        raise SystemExit(
            f"{plugin}: this SGLang is not known: {method}({', '.join(parameters)}); expected "
            f"({', '.join(known)})"
        )


def require_served(result: None, server_args: Any) -> None:
    """End the start if attention is not FlashMLA's, where no kernel of flashdsa would run.

    Args:
        result: of SGLang's check.
        server_args: SGLang's, with its defaults for the model and the GPU.

    Raises:
        SystemExit: prefill or decode has another backend.
    """
    try:
        resolved = import_module("sglang.srt.arg_groups.overrides").resolution_result
    except (ImportError, AttributeError):  # 0.5.13 writes its defaults into the fields
        resolved = getattr
    for phase in ("prefill", "decode"):
        chosen = resolved(server_args, f"dsa_{phase}_backend")
        if chosen not in (None, *SERVED):
            raise SystemExit(
                f"{NAME}: --dsa-{phase}-backend {chosen} is not served; expected flashmla_sparse, "
                "or flashmla_kv for an fp8 cache"
            )


def prepare(result: None, backend: Any, *given: Any, **named: Any) -> None:
    """Load the attention's kernels for the server's sizes, and say what serves.

    Args:
        result: of the constructor. backend: SGLang's, which is made before requests come.
        given, named: other arguments of the constructor.

    Raises:
        UnsupportedError: kernels are missing, or nothing serves rows of these sizes.
    """
    rope = backend.qk_rope_head_dim
    sizes: dict[str, Any] = {
        "S": start.counts_up_to(MOST_QUERIES),
        "H": getattr(backend, "num_dcp_q_heads", backend.num_q_heads),
        "topk": backend.dsa_index_topk,
        "d_qk": backend.kv_lora_rank + rope,
        "d_v": backend.kv_lora_rank,
        "S_kv": MANY_ROWS,
        "topk_length": (False, True),
    }
    packed = backend.dsa_kv_cache_store_fp8
    if packed and rope not in FORMATS:
        raise UnsupportedError(
            f"{NAME}: serves an fp8 cache with {' or '.join(map(str, FORMATS))} columns of RoPE; "
            f"got {rope}"
        )
    # Prompts of a packed cache may come as bf16 rows, which SGLang has gathered.
    forms: list[dict[str, Any]] = [{}]
    if packed:
        forms.insert(0, {"kv_dtype": torch.uint8, "kv_format": FORMATS[rope].name})
    found = [name for form in forms for name in start.load("sparse_mla_fwd", **sizes, **form)]
    served = (("sparse_mla_fwd", " and ".join(dict.fromkeys(found))),)
    cache = f"kv cache {'of packed rows' if packed else 'bf16'}"
    left = (
        f"SGLang's: the indexer without {INDEXER_NAME}, RoPE, writes to the caches, dense prompts"
    )
    start.say(LOGGER, start.described(served, cache, left))


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
        q_all: (T, H, 576), or 512 without RoPE. kv_cache: (N, 1, 576), or 512, or (N, 1, 656)
            bytes of packed rows, without RoPE 528.
        page_table_1: (T, topk) int32, rows of kv_cache.
        topk_length: (T,) int32; one of another length is left out, as SGLang does.

    Returns:
        (T, H, v_head_dim).
    """
    if topk_length is not None and len(topk_length) != len(q_all):
        topk_length = None
    packed = kv_cache.itemsize == 1
    return sparse_mla_fwd(
        q_all,
        kv_cache.view(torch.uint8) if packed else kv_cache,
        page_table_1,
        d_v=v_head_dim,
        sm_scale=sm_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        kv_format=FORMATS[q_all.shape[-1] - v_head_dim].name if packed else None,
    )[0]


def forward_packed(
    backend: Any,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,
    metadata: Any,
    page_table_1: Tensor,
) -> Tensor:
    """Replace `_forward_flashmla_kv`: packed rows as they are, and bf16 rows without packing them.

    Args:
        q_all, kv_cache: as for `forward`.
        layer: not used. metadata: SGLang's, with the lists' lengths, behind which only -1 stands.
        page_table_1: (T, topk) int32, rows of kv_cache.

    Returns:
        (T, 1, H, v_head_dim).
    """
    lengths = metadata.dsa_cache_seqlens_int32
    out = forward(backend, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, lengths)
    return out.unsqueeze(1)
