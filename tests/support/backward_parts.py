"""Other launches of Hopper's backward than it chooses."""

from __future__ import annotations

from flashdsa.backends.sm90.mla_bwd_choice import Call, Dkv, Part, choose


def without_tickets(call: Call) -> tuple[Part, ...]:
    """CTAs take turns."""
    return tuple(part._replace(tickets=False, dkv=Dkv.ADDED) for part in choose(call))
