"""Index-K cache: quantised indexer keys and queries, and the packed pages of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from flashdsa import problem
from flashdsa.backends.mxfp4 import quantize as quantize_mxfp4
from flashdsa.backends.packed_rows import next_power_of_two, scale_of
from flashdsa.dispatch.checks import require_dtype, require_tensor
from flashdsa.dispatch.dtypes import ATTENTION_DTYPES, E4M3, FP32
from flashdsa.dispatch.registration import call, register
from flashdsa.dispatch.rows import Operand, Output, Parameter, Sizes
from flashdsa.dispatch.spec import OpSpec
from flashdsa.dispatch.transforms import require_byte_views
from flashdsa.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "fake_quantize_index",
    "quantize_index_k",
    "quantize_index_q",
    "read_index_k_cache",
    "write_index_k_cache",
]

TOKEN_BYTES = (problem.INDEX_TOKEN_BYTES, problem.MXFP4_TOKEN_BYTES)
"""Bytes that a key may have in the cache."""
MAX_PAGES = 2**31 // problem.PAGE_SIZE
"""Token ids are int32."""


def _require_packed_pages(name: str, cache: Tensor, sizes: Sizes) -> None:
    """Each page's bytes are those of 64 tokens and contiguous, its scales aligned, its ids within
    int32."""
    if cache.shape[3] not in TOKEN_BYTES:
        names = " or ".join(f"[num_pages, {problem.PAGE_SIZE}, 1, {size}]" for size in TOKEN_BYTES)
        raise ArgumentValueError(f"{name}: expected shape {names}; got {list(cache.shape)}")
    if cache.stride(3) != 1 or cache.stride(1) != cache.shape[3]:
        raise ArgumentValueError(
            f"{name}: expected each page's bytes to be contiguous; got strides "
            f"{list(cache.stride())}"
        )
    if cache.stride(0) % problem.SCALE_BYTES or cache.storage_offset() % problem.SCALE_BYTES:
        raise ArgumentValueError(
            f"{name}: expected pages aligned to {problem.SCALE_BYTES} bytes for their fp32 scales; "
            f"got page stride {cache.stride(0)} and offset {cache.storage_offset()}"
        )
    if sizes["num_pages"] > MAX_PAGES:
        raise ArgumentValueError(
            f"{name}: expected at most {MAX_PAGES} pages (int32 token ids); "
            f"got {sizes['num_pages']}"
        )


_K = Operand(f"T {problem.INDEX_HEAD_DIM}", (torch.bfloat16, torch.float32))
_SLOTS = Operand("T", (torch.int32, torch.int64))
CACHE = Operand(
    f"num_pages {problem.PAGE_SIZE} 1 token_bytes",
    (torch.uint8, torch.int8),
    rule=_require_packed_pages,
    among={"token_bytes": TOKEN_BYTES},
    begins_at=problem.SCALE_BYTES,
)
_KEYS_AND_SCALES = (Output("fp8", f"T {problem.INDEX_HEAD_DIM}", E4M3), Output("scale", "T", FP32))


class IndexKOperands(NamedTuple):
    """Operand of `quantize_index_k`."""

    k: Annotated[Tensor, _K]


class IndexQOperands(NamedTuple):
    """Operands of `quantize_index_q`."""

    q: Annotated[Tensor, replace(_K, shape=f"B H {problem.INDEX_HEAD_DIM}")]
    weights: Annotated[Tensor, Operand("B H", FP32, strided=True)]


class CacheWriteOperands(NamedTuple):
    """Operands of `write_index_k_cache`; the cache is written."""

    k: Annotated[Tensor, _K]
    slots: Annotated[Tensor, replace(_SLOTS, note=", one a key")]
    cache: Annotated[Tensor, replace(CACHE, written=True)]


class CacheReadOperands(NamedTuple):
    """Operands of `read_index_k_cache`."""

    cache: Annotated[Tensor, CACHE]
    slots: Annotated[Tensor, _SLOTS]


_MXFP4, _POWER_OF_TWO = Parameter("mxfp4", "bool"), Parameter("power_of_two", "bool")
QUANTIZE_INDEX_K = register(
    OpSpec(
        "quantize_index_k",
        IndexKOperands,
        cpu="quantize:quantize_index_k",
        parameters=(_MXFP4, _POWER_OF_TWO),
        outputs=_KEYS_AND_SCALES,
    )
)
QUANTIZE_INDEX_Q = register(
    OpSpec(
        "quantize_index_q",
        IndexQOperands,
        cpu="quantize:quantize_index_q",
        parameters=(_MXFP4, _POWER_OF_TWO),
        outputs=(
            Output("fp8", f"B H {problem.INDEX_HEAD_DIM}", E4M3),
            Output("folded_weights", "B H", FP32),
        ),
    )
)
WRITE_INDEX_K_CACHE = register(
    OpSpec(
        "write_index_k_cache",
        CacheWriteOperands,
        cpu="index_k_cache:write",
        parameters=(_POWER_OF_TWO,),
    )
)
READ_INDEX_K_CACHE = register(
    OpSpec(
        "read_index_k_cache", CacheReadOperands, cpu="index_k_cache:read", outputs=_KEYS_AND_SCALES
    )
)


def quantize_index_k(
    k: Tensor, *, scale: str = "fp32", mxfp4: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Indexer keys as e4m3 with a scale each: ``scale = max(amax|k|, 1e-4) / 448``.

    Args:
        k: (T, 128) bf16 or fp32.
        scale: "fp32", as it is; "ue8m0": rounded up to a power of two, as DeepSeek's released
            configuration and vLLM write keys, still as fp32. MXFP4's are powers with either.
        mxfp4: rounded to MXFP4 instead, as a cache of 68 bytes a key holds them: the result is
            what `read_index_k_cache` would read from it.
        backend: "auto" or the name of one.

    Returns:
        fp8 (T, 128) float8_e4m3fn = round(k / scale), to nearest even, and scale (T,) fp32.
    """
    fp8_and_scale: tuple[Tensor, Tensor] = call(
        QUANTIZE_INDEX_K, (k,), (mxfp4, _is_power_of_two(scale)), backend
    )
    return fp8_and_scale


def quantize_index_q(
    q: Tensor, weights: Tensor, *, scale: str = "fp32", mxfp4: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Indexer queries as e4m3, each head's scale (see `quantize_index_k`) folded into its weight.

    Args:
        q: (B, H, 128) bf16 or fp32.
        weights: (B, H) fp32.
        scale: as for `quantize_index_k`.
        mxfp4: rounded to MXFP4 first, as DeepSeek-V4.1 rounds its queries.
        backend: "auto" or the name of one.

    Returns:
        fp8 (B, H, 128) float8_e4m3fn and folded weights (B, H) fp32.
    """
    fp8_and_folded: tuple[Tensor, Tensor] = call(
        QUANTIZE_INDEX_Q, (q, weights), (mxfp4, _is_power_of_two(scale)), backend
    )
    return fp8_and_folded


def _is_power_of_two(scale: object, *others: str) -> bool:
    """Whether `scale` asks for one; ArgumentTypeError or ArgumentValueError for none of "fp32",
    "ue8m0" and `others`."""
    names = ("ue8m0", "fp32", *others)
    if scale not in names:
        error = ArgumentValueError if isinstance(scale, str) else ArgumentTypeError
        *first, last = (f'"{name}"' for name in names)
        raise error(f"scale: expected {', '.join(first)} or {last}; got {scale!r}")
    return scale == "ue8m0"


def fake_quantize_index(x: Tensor, *, scale: str = "ue8m0") -> Tensor:
    """`x` as the fp8 indexer sees it: rounded to e4m3 with a scale a vector, and back.

    The gradient passes straight through. "ue8m0" makes the result exact in bf16 (4 significant
    bits times a power of two), so that `indexer_scores` learns on the numbers that are ranked.

    Args:
        x: (..., 128) bf16, fp16, fp32 or fp64: index queries or keys.
        scale: "ue8m0", ``max(amax|x|, 1e-4) / 448`` rounded up to a power of two; "fp32", as it
            is (the default of `quantize_index_k`); or "mxfp4": e2m1 with 4 scales, as
            ``quantize_index_k(mxfp4=True)`` rounds.

    Returns:
        x's shape and dtype; NaN throughout a vector that holds NaN or infinity.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    require_tensor("x", x)
    require_dtype("x", x, *ATTENTION_DTYPES)
    if x.dim() < 1 or x.shape[-1] != problem.INDEX_HEAD_DIM:
        raise ArgumentValueError(
            f"x: expected a last dimension of {problem.INDEX_HEAD_DIM}; got shape {list(x.shape)}"
        )
    power_of_two = _is_power_of_two(scale, "mxfp4")
    if scale != "fp32":
        require_byte_views("fake_quantize_index", x)
    wide = x.detach().float()
    if scale == "mxfp4":
        fp8, factor = quantize_mxfp4(wide)
        rounded = fp8.float() * factor[..., None]
    else:
        factor = scale_of(wide)[..., None]
        factor = next_power_of_two(factor) if power_of_two else factor
        rounded = (wide / factor).to(torch.float8_e4m3fn).float() * factor
    # Less 0, with x's gradient; NaN only where the rounded vector is NaN throughout.
    return rounded.to(x.dtype) - (x.detach() - x)


def write_index_k_cache(
    k: Tensor, slots: Tensor, cache: Tensor, *, scale: str = "fp32", backend: str = "auto"
) -> None:
    """Quantise `k` and write it into the packed pages.

    Args:
        k: (T, 128) bf16 or fp32.
        slots: (T,) int32 or int64, distinct: ``page * 64 + offset``. -1 skips the key (padding).
        cache: (num_pages, 64, 1, 132) uint8 or int8, changed in place; or (num_pages, 64, 1, 68)
            for MXFP4, two e2m1 codes in a byte and 4 scales a key.
        scale: as for `quantize_index_k`.
        backend: "auto" or the name of one.
    """
    call(WRITE_INDEX_K_CACHE, (k, slots, cache), (_is_power_of_two(scale),), backend)


def read_index_k_cache(
    cache: Tensor, slots: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The quantised keys of `slots`, as `quantize_index_k` returned them.

    Args:
        cache: (num_pages, 64, 1, 132) or (num_pages, 64, 1, 68) uint8 or int8.
        slots: (T,) int32 or int64 in [0, num_pages * 64).
        backend: "auto" or the name of one.

    Returns:
        fp8 (T, 128) float8_e4m3fn and scale (T,) fp32; the key is ``fp8 * scale``.
    """
    fp8_and_scale: tuple[Tensor, Tensor] = call(READ_INDEX_K_CACHE, (cache, slots), (), backend)
    return fp8_and_scale
