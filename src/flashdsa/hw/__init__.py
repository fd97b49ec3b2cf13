"""Facts about the architectures: numbers with the manual's section, no logic."""

from flashdsa.hw.arch import SM90, SM100, ArchSpec

__all__ = ["SM90", "SM100", "ArchSpec"]
