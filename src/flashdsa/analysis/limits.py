"""What the hardware grants of registers."""

from __future__ import annotations

from flashdsa.plan.roles import MOST_REGISTERS, registers_each

CTA_REGISTERS = 65_536
"""32-bit registers of an SM, and of a CTA (CUDA C++ Programming Guide, "Technical Specifications
per Compute Capability", 9.0 and 10.0)."""


def registers_by_threads(threads: int | None) -> int:
    """What each thread of a CTA can have at launch; None: as many threads as the launch says."""
    return MOST_REGISTERS if threads is None else registers_each(threads, CTA_REGISTERS)
