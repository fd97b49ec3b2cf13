"""The zero-column mask descriptor of tcgen05.mma.ws (64 bits)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors.bits import put, take


@dataclass(frozen=True, slots=True)
class ZeroColumnMask:
    """Columns of B that count as zero (PTX ISA, "Zero-Column Mask Descriptor").

    The N columns are cut into 128 / M sub-masks. Each alternates spans of `use_span` columns where
    B is used and `skip_span` columns of zeros; sub-mask i starts with zeros if `first_span[i]`,
    and its first `start_count[i]` columns are cut off.

    Attributes:
        start_count, first_span: of the four sub-masks.
        is_nonzero: False means that no column is masked.
        skip_span, use_span: lengths in columns, 1 to 256.
        column_shift: B's columns are taken from this one on.
    """

    start_count: tuple[int, int, int, int] = (0, 0, 0, 0)
    first_span: tuple[bool, bool, bool, bool] = (False, False, False, False)
    is_nonzero: bool = False
    skip_span: int = 1
    use_span: int = 1
    column_shift: int = 0

    @classmethod
    @lru_cache(maxsize=64)
    def decode(cls, value: int) -> ZeroColumnMask:
        """The fields of a 64-bit descriptor."""
        s0, s1, s2, s3 = (take(value, 8 * i, 8) for i in range(4))
        f0, f1, f2, f3 = (bool(take(value, 32 + i, 1)) for i in range(4))
        return cls(
            (s0, s1, s2, s3),
            (f0, f1, f2, f3),
            bool(take(value, 39, 1)),
            take(value, 40, 8) + 1,
            take(value, 48, 8) + 1,
            take(value, 56, 6),
        )

    def encode(self) -> int:
        """The 64-bit descriptor.

        Raises:
            ValueError: a field does not fit.
        """
        value = 0
        for i in range(4):
            value |= put(self.start_count[i], 8 * i, 8, "start_count")
            value |= put(int(self.first_span[i]), 32 + i, 1, "first_span")
        return (
            value
            | put(int(self.is_nonzero), 39, 1, "is_nonzero")
            | put(self.skip_span - 1, 40, 8, "skip_span")
            | put(self.use_span - 1, 48, 8, "use_span")
            | put(self.column_shift, 56, 6, "column_shift")
        )

    def zero_columns(self, m: int, n: int) -> NDArray[np.bool_]:
        """Return shape (n,) for an M x N instruction: True where B counts as zero."""
        mask = np.zeros(n, dtype=np.bool_)
        if not self.is_nonzero:
            return mask
        parts = 128 // m
        width = n // parts
        for part in range(parts):
            position = self.start_count[part] + np.arange(width)
            period = self.use_span + self.skip_span
            if self.first_span[part]:
                zero = position % period < self.skip_span
            else:
                zero = position % period >= self.use_span
            mask[part * width : (part + 1) * width] = zero
        return mask
