"""Requirements of one call as frozen data: dimensions, dtypes, features. No torch, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.row_formats import INDEX_MXFP4, V32, RowFormat, find_row_format

INT32_MAX = 2**31 - 1
D_QK = 576
"""Columns of `q` and `kv` in DeepSeek's MLA: 512 latent and 64 RoPE."""
D_V = 512
"""Columns of V, the first ones of `kv`."""
D_ROPE = D_QK - D_V
PAGE_SIZE = 64
"""Tokens of one page of the index-K cache, and of a paged kv."""
PARTS_OF_A_PAGE = (64, 32, 16, 8, 4, 2, 1)
"""Tokens that an entry of the indexer's block table may name, and positions of a block."""
SHORT_TABLE_PAGES = PARTS_OF_A_PAGE[1:]
"""The same if the entry is no whole page."""
KV_GROUP = V32.group
"""Latent columns of a packed kv row that share a scale."""
E4M3_MAX = 448.0
"""Largest number of an 8-bit float with 4 exponent and 3 mantissa bits."""
MIN_AMAX = 1e-4
"""Keeps the scale of an all-zero vector away from 0."""
INDEX_HEAD_DIM = 128
"""Columns of an indexer query head and of an indexer key."""
SCALE_BYTES = 4
"""One fp32 scale a token."""
INDEX_TOKEN_BYTES = INDEX_HEAD_DIM + SCALE_BYTES
"""A key of e4m3 in the index-K cache, with its scale."""
MXFP4_TOKEN_BYTES = INDEX_MXFP4.row_bytes
"""A key of e2m1 in it, with its four scales."""
PACKED_DTYPES = ("uint8", "int8")
"""Names of the dtypes in which packed rows come."""
PAGE_BYTES = PAGE_SIZE * INDEX_TOKEN_BYTES
PAGE_KEY_BYTES = PAGE_SIZE * INDEX_HEAD_DIM
"""The page's e4m3 keys come first; its fp32 scales follow."""
NUM_INDEX_HEADS = 64
INDEX_TOPK = 2048
DEVICES = ("cpu", "cuda", "xpu", "mps")
"""Types of devices that tensors of a call may be on."""
MAX_NEXT_N = 4
"""Neighbouring queries of one request, at most, whose pages the indexer reads together."""


@dataclass(frozen=True)
class Problem:
    """A call's requirements, compared with what each implementation declares.

    Dimensions that a call does not have stay None and constrain nothing.
    """

    operation: str
    device: str
    """Device type of the tensors, one of `DEVICES`."""
    dtype: str
    """Name of the main operand's dtype, e.g. "bfloat16"."""
    kv_dtype: str | None = None
    """Dtype of kv if the operation has it: `dtype`, or bytes for packed rows."""
    width: int | None = None
    """Columns of kv, or bytes of its packed rows."""
    extra_width: int | None = None
    kv_format: str | None = None
    """The name that a caller gave for packed rows."""
    num_heads: int | None = None
    d_qk: int | None = None
    d_v: int | None = None
    topk: int | None = None
    attn_sink: bool = False
    topk_length: bool = False
    extra_kv: bool = False
    ends: bool = False
    extra_ends: bool = False
    index_block: int = 1
    batch_invariant: bool = False
    max_logits: bool = False
    deterministic: bool = False
    sorted: bool = False
    positions: bool = False
    """The indexer's ids are token positions, not cache slots."""
    table_page_size: int = PAGE_SIZE
    """Tokens that an entry of the indexer's block table names."""
    token_bytes: int | None = None
    """Bytes of a key in the indexer's cache."""
    block: int = 1
    """Positions of the indexer's blocks, and whether there are candidates among them."""
    candidates: bool = False
    next_n: int = 1
    """The indexer's neighbouring queries that share a row of the block table."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability of the tensors' GPU; None on the CPU."""

    @property
    def mixed_formats(self) -> bool:
        """Whether two sources have packed rows of different formats."""
        return len(set(self.row_formats)) > 1

    @property
    def row_formats(self) -> tuple[RowFormat, ...]:
        """Formats of packed rows of kv, and of a second source."""
        if self.kv_dtype not in PACKED_DTYPES:
            return ()
        widths = [width for width in (self.width, self.extra_width) if width is not None]
        return tuple(find_row_format("kv", (x,), self.kv_format, alone=False) for x in widths)

    @property
    def ranges(self) -> bool:
        """Whether a list of rows is a range."""
        return self.ends or self.extra_ends
