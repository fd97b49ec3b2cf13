"""Compile-time values inside the contexts of roles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Static:
    """A Python value that CuTe DSL carries through loops and branches as it is.

    The DSL would take a dataclass in a plain field apart and make its integers run-time values.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: Sequence[Any]) -> Static:
        return self
