"""Quantisation of the indexer's keys and queries by torch on any device."""

from __future__ import annotations

from flashdsa.backends.cpu.quantize import quantize_index_k, quantize_index_q

__all__ = ["quantize_index_k", "quantize_index_q"]
