"""Compressed entries by torch on any device."""

from __future__ import annotations

from flashdsa.backends.cpu.entries import backward, forward

__all__ = ["backward", "forward"]
