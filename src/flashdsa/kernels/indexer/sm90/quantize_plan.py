"""Inputs of a compiled quantisation, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashdsa.plan import Role


@dataclass(frozen=True)
class QuantizePlan:
    """One compiled quantisation.

    Attributes:
        dtype: of the vectors, "bfloat16" or "float32".
        slot_bits: of the slots that say where in the cache a vector goes, 32 or 64; 0: no cache,
            vectors and scales are stored side by side.
    """

    dtype: str = "bfloat16"
    slot_bits: int = 64
    roles: ClassVar[tuple[Role, ...]] = ()  # all warps do the same
    smem_bytes = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype: expected bfloat16 or float32; got {self.dtype}")
        if self.slot_bits not in (0, 32, 64):
            raise ValueError(f"slot_bits: expected 0, 32 or 64; got {self.slot_bits}")

    @property
    def name(self) -> str:
        if self.slot_bits:
            return f"write_index_k_{self.dtype}_slots{self.slot_bits}"
        return f"quantize_index_{self.dtype}"
