"""The classes that vLLM instantiates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view
from vllm.v1.attention.ops.metadata import compute_token_to_req_indices
from vllm.v1.worker.workspace import current_workspace_manager

from flashdsa.backends.catalog import registry
from flashdsa.errors import UnsupportedError
from flashdsa.integrations import start
from flashdsa.integrations.vllm import (
    INDEXER_NAME,
    LOGGER,
    NAME,
    attend,
    indexer,
    join,
    say_untried,
)
from flashdsa.ops.kv_cache import read_kv_cache
from flashdsa.problem import D_QK, D_V, PAGE_SIZE

PACKED_CACHE = "fp8_ds_mla"
"""vLLM's name of packed rows of 656 bytes."""


ROWS_AT_ONCE = 2**16
"""Rows of prompts that attention reads at once: 75 MB, or the rows of one longer prompt."""
ROWS_OF_A_PART = 2**15
"""Rows that are unpacked at once, which takes some 5 KB of memory a row."""
MANY_ROWS = 2**17
"""Rows of a cache, as far as the choice of a kernel counts them."""


class Prompts(NamedTuple):
    """Some prompts of a batch.

    Attributes:
        tokens: the batch's that are theirs.
        slots: (rows,) int64, where the cache holds their rows, prompt after prompt.
        first_row: (tokens,) int32, the first of these rows that is of a token's prompt.
    """

    tokens: slice
    slots: Tensor
    first_row: Tensor


@dataclass
class FlashDsaMLASparseMetadata(SparseMLACommonMetadata):  # type: ignore[misc]
    """vLLM's, and the prompts of a batch if the cache is packed."""

    prompts: tuple[Prompts, ...] = ()


class FlashDsaMLASparseBuilder(SparseMLACommonMetadataBuilder):  # type: ignore[misc]
    """vLLM's builder of metadata. Batches of equal decodes are captured into CUDA graphs, drafts
    and their verification among them."""

    metadata_cls = FlashDsaMLASparseMetadata
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """vLLM's arguments."""
        super().__init__(*arguments, **named)
        # One query a decode, or as many as a verification has: longer ones are prompts.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        self.unpacks = (
            self.vllm_config.cache_config.cache_dtype == PACKED_CACHE and self.dcp_world_size == 1
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Describe a batch."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.unpacks and metadata.num_prefills:
            metadata.prompts = find_prompts(metadata, common_attn_metadata)
        return metadata

    def update_draft_decode_metadata(self, metadata: FlashDsaMLASparseMetadata) -> None:
        """Write the requests of a draft's tokens anew: all else is a view of vLLM's buffers."""
        tokens = metadata.num_decode_tokens
        if tokens:
            compute_token_to_req_indices(
                metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens
            )


def find_prompts(metadata: FlashDsaMLASparseMetadata, common: Any) -> tuple[Prompts, ...]:
    """Find the rows of a batch's prompts, without waiting for the GPU.

    The host knows upper bounds of the prompts' lengths. Rows behind the true lengths are copies of
    slot 0, which no list names.
    """
    first, size = metadata.num_decodes, metadata.block_size
    lengths = common.seq_lens_cpu_upper_bound.tolist()
    starts = common.query_start_loc_cpu.tolist()
    found = []
    while first < len(lengths):
        end = first + 1
        while end < len(lengths) and sum(lengths[first : end + 1]) <= ROWS_AT_ONCE:
            end += 1
        rows = common.seq_lens[first:end]
        ends = rows.cumsum(0)
        before = ends - rows
        row = torch.arange(sum(lengths[first:end]), device=rows.device)
        owner = _find_owners(row, ends)
        place = torch.where(row < ends[-1], row - before[owner], 0)
        slots = metadata.block_table[first:end][owner, place // size] * size + place % size
        slots = torch.where(row < ends[-1], slots, 0)
        token = torch.arange(starts[first], starts[end], device=rows.device)
        first_row = before.int()[_find_owners(token, common.query_start_loc[first + 1 : end + 1])]
        found.append(Prompts(slice(starts[first], starts[end]), slots, first_row))
        first = end
    return tuple(found)


def _find_owners(numbers: Tensor, ends: Tensor) -> Tensor:
    """Return for each number which of the ranges that end at `ends` has it, or else the last.

    `repeat_interleave` would leave the rest of its result unwritten if the bound is too large.
    """
    return torch.searchsorted(ends.long(), numbers, right=True).clamp_(max=len(ends) - 1)


class FlashDsaMLASparseImpl(SparseMLACommonImpl):  # type: ignore[misc]
    """One layer's attention: vLLM's, with flashdsa for the sparse part."""

    lse_base_on_e: ClassVar[bool] = True
    can_return_lse_for_decode: ClassVar[bool] = True
    supports_dcp: ClassVar[bool] = True
    vllms: ClassVar[str] = "the indexer"
    """Part that vLLM serves, beside what no backend replaces."""
    # Prompts' ids are converted layer by layer, as by vLLM's backends of Hopper.
    group_conversion_decode_only: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """vLLM's arguments.

        Kernels are loaded, and memory is reserved where vLLM counts it, before requests come.

        Raises:
            UnsupportedError: V has other columns than 512, or kernels are missing.
        """
        super().__init__(*arguments, **named)
        if self.kv_lora_rank != D_V:
            raise UnsupportedError(
                f"kv_lora_rank: {NAME} takes {D_V} columns of V; got {self.kv_lora_rank}"
            )
        self.supports_quant_query_input = False
        say_untried()
        config = get_current_vllm_config()
        self.packed = self.kv_cache_dtype == PACKED_CACHE
        self.most_tokens = config.scheduler_config.max_num_batched_tokens
        self.most_rows = max(ROWS_AT_ONCE, config.model_config.max_model_len)
        self._buffers()
        of_layer = named.get("indexer")
        served = self._load(of_layer, config.model_config.hf_text_config.index_topk)
        if of_layer is not None:
            left = f"vLLM's: {self.vllms}, RoPE, writes to the caches, dense short prompts"
            cache = f"kv cache {self.kv_cache_dtype}"
            start.say(LOGGER, start.described(tuple(served.items()), cache, left))

    def _buffers(self) -> list[Tensor]:
        """Return memory for q's columns in one tensor, and of a packed cache for prompts' rows.

        All layers share it with the rest of vLLM. Its size is always the same, as it must not grow
        after vLLM has measured how much memory is left for the cache.
        """
        if self.dcp_world_size > 1:  # vLLM joins q, and packed rows are read as they are
            return []
        columns = D_QK if self.packed else self.head_size
        shapes: list[tuple[int, ...]] = [(self.most_tokens, self.num_heads, columns)]
        if self.packed:
            shapes.append((self.most_rows, D_QK))
        specs = [(shape, torch.bfloat16) for shape in shapes]
        found: list[Tensor] = current_workspace_manager().get_simultaneous(*specs)
        return found

    def _load(self, of_layer: Any, topk: int) -> dict[str, str]:
        """Load the kernels for the server's sizes; return what serves each operation.

        Args:
            of_layer: the layer's indexer, or None.
            topk: slots of a list.

        Raises:
            UnsupportedError: kernels are missing.
        """
        sizes: dict[str, Any] = {
            "S": start.counts_up_to(self.most_tokens),
            "H": self.num_heads * self.dcp_world_size,
            "topk": topk,
        }
        columns = D_QK if self.packed else self.head_size
        rows: dict[str, Any] = {"kv_dtype": torch.uint8} if self.packed else {"d_qk": columns}
        served = start.load("sparse_mla_fwd", topk_length=True, S_kv=MANY_ROWS, **sizes, **rows)
        if self.packed and self.dcp_world_size == 1:
            unpacked = (PAGE_SIZE * 32, ROWS_AT_ONCE)
            served += start.load("sparse_mla_fwd", S_kv=unpacked, d_qk=columns, **sizes)
        return {"sparse_mla_fwd": " and ".join(dict.fromkeys(served))}

    def forward_mqa(self, q: Any, kv_cache: Tensor, metadata: Any, layer: Any) -> Any:
        """Compute as vLLM does, but a packed cache's prompts over rows that are unpacked once."""
        decodes = metadata.num_decode_tokens
        if not metadata.prompts or not isinstance(q, tuple) or len(q[0]) <= decodes:
            return super().forward_mqa(q, kv_cache, metadata, layer)
        outs = []
        if decodes:
            of_decodes = q[0][:decodes], q[1][:decodes]
            outs.append(super().forward_mqa(of_decodes, kv_cache, metadata, layer)[0])
        queries, room = self._buffers()
        for prompt in metadata.prompts:
            ids = self.topk_indices_buffer[prompt.tokens]
            ids = torch.where(ids < 0, ids, ids + prompt.first_row[:, None])
            slots = prompt.slots[: len(room)]  # no list names a row behind the longest prompt
            rows = room[: len(slots)]
            for first in range(0, len(slots), ROWS_OF_A_PART):
                part = slice(first, first + ROWS_OF_A_PART)
                rows[part] = read_kv_cache(kv_cache, slots[part])
            of_prompt = join(q[0][prompt.tokens], q[1][prompt.tokens], queries)
            outs.append(attend(of_prompt, rows, ids, None, self.scale, with_lse=False)[0])
        return (outs[0] if len(outs) == 1 else torch.cat(outs)), None

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
    ) -> tuple[Tensor, Tensor | None]:
        """Compute for vLLM: slots of the cache's rows, and how many of each row are in use."""
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        return attend(
            join(*q, self._buffers()[0]) if isinstance(q, tuple) else q,
            rows,
            topk_indices,
            valid_counts,
            self.scale,
            with_lse=self.need_to_return_lse_for_decode,
        )


class FlashDsaMLASparseIndexerImpl(FlashDsaMLASparseImpl):
    """The same, and the top-k of its layer's indexer."""

    vllms = "verifications of unequal lengths"

    def _load(self, of_layer: Any, topk: int) -> dict[str, str]:
        """Also have flashdsa choose.

        Raises:
            UnsupportedError: kernels are missing, or an indexer that flashdsa does not serve.
        """
        served = super()._load(of_layer, topk)
        return served if of_layer is None else served | indexer.install(of_layer)


class FlashDsaMLASparseBackend(AttentionBackend):  # type: ignore[misc]
    """Answers that vLLM needs before it builds the layers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", PACKED_CACHE]

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
        """Columns of a query, with and without RoPE."""
        return [D_QK, D_V]

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any
    ) -> str | None:
        """Say which name of a cache stands for packed rows: vLLM's fp8 has another layout."""
        if kv_cache_dtype in (None, *cls.supported_kv_cache_dtypes):
            return None
        return f"{cls.get_name()} takes --kv-cache-dtype {PACKED_CACHE}, not {kv_cache_dtype}"

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
        """GPUs that flashdsa has a forward for: own kernels or Triton's."""
        here = capability.major, capability.minor
        return any(
            one.automatic and one.features.gpus != "" and one.features.runs_on(here)
            for one in registry.implementations("sparse_mla_fwd")
        )


class FlashDsaMLASparseIndexerBackend(FlashDsaMLASparseBackend):
    """The same, and DeepSeek-V3.2's indexer."""

    @staticmethod
    def get_name() -> str:
        """Its name on the command line."""
        return INDEXER_NAME

    @staticmethod
    def get_impl_cls() -> type[FlashDsaMLASparseImpl]:
        """Return the class of a layer's attention."""
        return FlashDsaMLASparseIndexerImpl
