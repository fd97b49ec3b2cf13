"""The classes that vLLM instantiates."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from flashdsa.errors import UnsupportedError
from flashdsa.integrations.vllm import NAME, attend
from flashdsa.problem import D_QK, PAGE_SIZE

HOPPER = 9


class FlashDsaMLASparseMetadata(SparseMLACommonMetadata):  # type: ignore[misc]
    """vLLM's, as it is."""


class FlashDsaMLASparseBuilder(SparseMLACommonMetadataBuilder):  # type: ignore[misc]
    """vLLM's builder of metadata, as it is."""

    metadata_cls = FlashDsaMLASparseMetadata


class FlashDsaMLASparseImpl(SparseMLACommonImpl):  # type: ignore[misc]
    """One layer's attention: vLLM's, with flashdsa for the sparse part."""

    lse_base_on_e: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """vLLM's arguments.

        Raises:
            UnsupportedError: a quantised cache.
        """
        super().__init__(*arguments, **named)
        if self.kv_cache_dtype not in ("auto", "bfloat16"):
            raise UnsupportedError(
                f"kv_cache_dtype: {NAME} takes auto or bfloat16; got {self.kv_cache_dtype}"
            )
        self.supports_quant_query_input = False

    def _forward_mqa_kernel(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        topk_indices: Tensor,
        valid_counts: Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute for vLLM: slots of the cache's rows, and how many of each row are in use."""
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        return attend(q, rows, topk_indices, valid_counts, self.scale)


class FlashDsaMLASparseBackend(AttentionBackend):  # type: ignore[misc]
    """Answers that vLLM needs before it builds the layers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Its name on the command line."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FlashDsaMLASparseImpl]:
        """Return the class of a layer's attention."""
        return FlashDsaMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[FlashDsaMLASparseBuilder]:
        """Return the class of the metadata's builder."""
        return FlashDsaMLASparseBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Columns of a query."""
        return [D_QK]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens of a block."""
        return [MultipleOf(PAGE_SIZE)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Blocks are whole rows apart, so that rows can be counted through."""
        return align_blocks_to_rows(spec)

    @classmethod
    def is_mla(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """GPUs that flashdsa has a forward for."""
        return bool(capability.major == HOPPER)
