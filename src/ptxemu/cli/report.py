"""What launches did and what was found, as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ptxemu.api import LaunchResult
from ptxemu.check import Finding

MOST_SHOWN = 20
"""Findings in a text report without --all."""


def launch_facts(result: LaunchResult) -> dict[str, Any]:
    """One launch, ready for JSON."""
    launch = result.launch
    return {
        "kernel": result.kernel,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "cluster": list(launch.cluster),
        "dynamic_shared_bytes": launch.dynamic_shared_bytes,
        "warp_instructions": result.warp_instructions,
        "async_operations": result.async_operations,
    }


def as_json(launches: Sequence[LaunchResult], findings: Sequence[Finding], **more: Any) -> str:
    """The whole report."""
    facts = {
        "launches": [launch_facts(result) for result in launches],
        "findings": [finding.to_json_dict() for finding in findings],
        **more,
    }
    return json.dumps(facts, indent=2) + "\n"


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether there is a finding of level error."""
    return any(finding.level == "error" for finding in findings)


def launch_lines(launches: Sequence[LaunchResult]) -> list[str]:
    """One line for each launch; equal ones in a row are counted."""
    lines: list[str] = []
    previous: tuple[Any, ...] | None = None
    repeated = 1
    for result in launches:
        launch = result.launch
        key = (result.kernel, launch.grid, launch.block, launch.cluster)
        if key == previous:
            repeated += 1
            lines[-1] = f"{_launch_line(result)} (x{repeated})"
            continue
        previous, repeated = key, 1
        lines.append(_launch_line(result))
    return lines


def _launch_line(result: LaunchResult) -> str:
    launch = result.launch
    cluster = f" cluster {_dims(launch.cluster)}" if launch.cluster != (1, 1, 1) else ""
    return (
        f"  {short_name(result.kernel)}: "
        f"grid {_dims(launch.grid)} block {_dims(launch.block)}{cluster} "
        f"smem {launch.dynamic_shared_bytes}, {result.warp_instructions} warp instructions, "
        f"{result.async_operations} asynchronous operations"
    )


def _dims(extent: tuple[int, int, int]) -> str:
    return "x".join(map(str, extent))


def finding_lines(
    findings: Sequence[Finding], *, with_notes: bool, limit: int | None = MOST_SHOWN
) -> list[str]:
    """Every finding once, errors first, with how often it occurred; at most `limit` of them."""
    rank = {"error": 0, "warning": 1, "note": 2}
    counts: Counter[tuple[str, str]] = Counter()
    for finding in findings:
        if finding.level != "note" or with_notes:
            counts[(finding.level, _text_of(finding))] += finding.count
    ordered = sorted(counts.items(), key=lambda item: rank.get(item[0][0], 3))
    lines = [
        f"{level}: {message}" + (f" [{count} times]" if count > 1 else "")
        for (level, message), count in ordered[:limit]
    ]
    if limit is not None and len(ordered) > limit:
        lines.append(f"... and {len(ordered) - limit} more (--all shows them)")
    return lines


def _text_of(finding: Finding) -> str:
    """The finding's line with its kernel's name shortened."""
    site = finding.first or finding.second
    if site is None:
        return finding.message
    return finding.message.replace(f"kernel {site.kernel}:", f"kernel {short_name(site.kernel)}:")


def short_name(kernel: str, width: int = 48) -> str:
    """A kernel's name without the mangled types that CuTe DSL appends."""
    return kernel if len(kernel) <= width else f"{kernel[: width - 12]}...{kernel[-9:]}"


def summary_line(
    launches: Sequence[LaunchResult], findings: Sequence[Finding], *, checked: bool
) -> str:
    """The last line of a report."""
    total = sum(result.warp_instructions for result in launches)
    what = f"{_counted(len(launches), 'launch', 'launches')}, {total} warp instructions"
    if not checked:
        return f"{what}, not checked"
    levels = Counter(finding.level for finding in findings)
    found = [_counted(levels[name], name, f"{name}s") for name in ("error", "warning", "note")]
    return f"{what}: {', '.join(found)}"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
