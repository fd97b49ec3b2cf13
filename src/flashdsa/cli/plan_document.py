"""A kernel's plan as plain data: the document of `flashdsa plan --json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flashdsa.hw import ARCHITECTURES, TMEM_LANES
from flashdsa.plan import Barrier, LiveRange, Role, SmemPlan, TmemPlan
from flashdsa.plan.kernel_spec import Variant

COLUMN_BYTES = TMEM_LANES * 4
"""A word of every lane."""
StepName = Callable[[int], str]


def describe(variant: Variant) -> dict[str, Any]:
    """Choices, memories, barriers, roles; with a timeline where the kernel has one."""
    spec, plan = variant
    timeline = spec.load_timeline()
    names = {row.step: row.name for row in timeline}
    document: dict[str, Any] = {
        "kernel": spec.name,
        "arch": spec.arch,
        "choices": variant.choices,
        "threads": plan.threads,
        "registers": {
            "total": sum(role.threads * role.registers for role in plan.roles),
            "capacity": ARCHITECTURES[spec.arch].registers,
        },
        "smem": _describe_smem(plan.smem, names.__getitem__),
    }
    tmem = getattr(plan, "tmem", None)
    if tmem is not None:
        document["tmem"] = _describe_tmem(tmem, names.__getitem__)
    document["barriers"] = [_describe_barrier(barrier) for barrier in plan.barriers]
    document["roles"] = [_describe_role(role) for role in plan.roles]
    if timeline:
        document["timeline"] = [{**row._asdict(), "step": row.step.name} for row in timeline]
    return document


def _describe_smem(smem: SmemPlan, step_name: StepName) -> dict[str, Any]:
    places = list(zip(smem.regions, smem.offsets, strict=True))
    spans = [(region.name, at, at + region.bytes) for region, at in places]
    return {
        "total": smem.total,
        "capacity": smem.capacity,
        "regions": [
            {
                "name": region.name,
                "offset": offset,
                "bytes": region.bytes,
                "share": region.bytes / smem.capacity,
                "align": region.align,
                "holds": region.holds,
                "stages": region.stages,
                "shares_with": _sharing(region.name, spans),
                "live": _live_ranges(region.live, step_name),
            }
            for region, offset in places
        ],
    }


def _describe_tmem(tmem: TmemPlan, step_name: StepName) -> dict[str, Any]:
    spans = [(r.name, r.column, r.column + r.columns) for r in tmem.regions]
    return {
        "allocated": tmem.allocated,
        "capacity": tmem.capacity,
        "regions": [
            {
                "name": region.name,
                "column": region.column,
                "columns": region.columns,
                "bytes": region.columns * COLUMN_BYTES,
                "share": region.columns / tmem.capacity,
                "holds": region.holds,
                "shares_with": _sharing(region.name, spans),
                "live": _live_ranges(region.live, step_name),
            }
            for region in tmem.regions
        ],
    }


def _sharing(name: str, spans: list[tuple[str, int, int]]) -> list[str]:
    start, stop = next((a, b) for other, a, b in spans if other == name)
    return [other for other, a, b in spans if other != name and a < stop and start < b]


def _live_ranges(live_ranges: Sequence[LiveRange], step_name: StepName) -> list[dict[str, Any]]:
    return [
        {
            "holds": live.holds,
            "stage": live.stage,
            "from": step_name(live.first),
            "to": step_name(live.last),
        }
        for live in live_ranges
    ]


def _describe_barrier(barrier: Barrier) -> dict[str, Any]:
    producer = ", ".join(role.name for role, _ in barrier.arriving)
    if barrier.from_peer:
        producer = f"peer's {producer}"
    if barrier.ctas > 1:
        producer = f"{producer} of {barrier.ctas} CTAs"
    return {
        "name": barrier.name,
        "stages": barrier.stages,
        "producer": producer,
        "arrives": "; ".join(dict.fromkeys(arrives.value for _, arrives in barrier.arriving)),
        "arrivals": barrier.arrivals,
        "transaction_bytes": barrier.transaction_bytes,
        "consumer": ", ".join(r.name for r in (barrier.consumer, *barrier.also_awaited_by)),
        "completed": barrier.completed,
    }


def _describe_role(role: Role) -> dict[str, Any]:
    return {
        "name": role.name,
        "warps": role.warps,
        "threads": role.threads,
        "registers": role.registers,
        "does": role.does,
    }
