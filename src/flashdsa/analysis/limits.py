"""Register limits of the hardware."""

from __future__ import annotations

from flashdsa.hw import MAX_REGISTERS, SM100
from flashdsa.plan.roles import registers_each

CTA_REGISTERS = SM100.registers
"""32-bit registers of an SM, and of a CTA; as many on sm_90a."""


def registers_by_threads(threads: int | None) -> int:
    """Return the most registers of each thread at launch; None: the launch sets the threads."""
    return MAX_REGISTERS if threads is None else registers_each(threads, CTA_REGISTERS)
