"""Budgets and barriers of the stream-K Hopper decode of 64 heads, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from flashdsa.kernels.attention.sm90.decode.full.plan import DecodePlan
from flashdsa.kernels.attention.sm90.decode.shared.plan import OF_CLUSTERS
from flashdsa.plan import Arrives, Barrier, SmemRegion


@dataclass(frozen=True)
class StreamKPlan(DecodePlan):
    """One compiled stream-K decode; fields as of the decode by clusters. Packed rows take an eighth
    longer if consumer 1 has 192 registers, though nothing spills then."""

    gather_registers: int = 96
    consumer1_registers: int = 200
    stream_k = True

    @property
    def name(self) -> str:
        return "mla_decode_stream_k" + self.suffix + "_joined" * self.joined

    @property
    def cluster_buffers(self) -> list[SmemRegion]:
        return self.stream_k_buffers

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """Barriers of tiles complete a phase for each use of their tile, those of a stretch one for
        each stretch, those of parts one for each part."""
        gather, zero, one = self.roles
        thread, every, warps = Arrives.ONE_THREAD, Arrives.EVERY_THREAD, Arrives.EVERY_WARP
        stored = "Q has come, and the stretch is stored"
        whole = [one for one in super().barriers if one.name not in OF_CLUSTERS]
        return (
            *(replace(one, completed=stored) if one.name == "q_full" else one for one in whole),
            Barrier("q_free", 1, zero, warps, gather, 0, "the stretch's scores are computed",
                    also_produced_by=one),
            Barrier("part_stored", 1, zero, every, zero, 0, "the part is in its slot",
                    also_produced_by=one),
            Barrier("ticket_full", 1, zero, thread, zero, 0, "the part's ticket is drawn",
                    also_awaited_by=(one,)),
        )  # fmt: skip
