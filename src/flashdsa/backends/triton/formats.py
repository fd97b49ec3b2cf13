"""Which packed rows Triton's kernels read (`kernels/triton/packed_rows.py`), without Triton."""

from __future__ import annotations

from collections.abc import Iterator

from flashdsa.row_formats import RowFormat, takes, takes_multiples

SHAPES = ("512 + 0", "512 + 64", "448 + 64")
"""Coded and bf16 columns: V's 512 come in parts of 128."""
GROUPS = {"fp32": (128,), "e8m0": (16, 32, 64, 128), "e4m3": (16, 32, 64, 128)}
"""Columns that share a scale: a power of two in each part; fp32 scales are a factor of a part's
products, so a part has one."""


def objections(form: RowFormat) -> Iterator[str]:
    """Object to packed rows that the kernels do not read."""
    yield from takes("columns + rope", f"{form.columns} + {form.rope}", *SHAPES)
    yield from takes(f"group of {form.scale} scales", form.group, *GROUPS[form.scale])
    yield from takes_multiples(form, data=1, rope=2, scales=4 if form.scale == "fp32" else 1)
