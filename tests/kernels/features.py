"""Features that a kernel's test asks for all at once."""

from __future__ import annotations

from typing import Any, Final

EVERY_FEATURE: Final[dict[str, Any]] = {
    "duplicates": True,
    "invalid": True,
    "empty_rows": True,
    "topk_length": True,
    "poison": True,
    "strided": True,
    "kv_3d": True,
    "indices_3d": True,
}
"""Of a `SparseMlaCase`, but for those of one operation: sinks, largest logits."""
