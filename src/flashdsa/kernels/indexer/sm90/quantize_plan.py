"""Inputs of a compiled quantisation, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.plan import UniformPlan


@dataclass(frozen=True)
class QuantizePlan(UniformPlan):
    """One compiled quantisation.

    Attributes:
        dtype: of the vectors, "bfloat16" or "float32".
        to_cache: slots say where in the cache a vector goes; else vectors and scales are stored
            side by side.
    """

    dtype: str = "bfloat16"
    to_cache: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype: expected bfloat16 or float32; got {self.dtype}")

    @property
    def name(self) -> str:
        return f"{'write_index_k' if self.to_cache else 'quantize_index'}_{self.dtype}"
