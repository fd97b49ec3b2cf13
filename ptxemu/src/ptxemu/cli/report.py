"""Results and findings of launches, as text and as JSON."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ptxemu.api import LaunchResult
from ptxemu.check import Finding
from ptxemu.check.findings import LEVELS
from ptxemu.cli import kernel_names
from ptxemu.cli.merging import seed_names
from ptxemu.cli.outcome import Ran

MOST_SHOWN = 20
"""Findings in a text report without --all."""


def own_version() -> str:
    """The version of ptxemu."""
    try:
        return version("ptxemu")
    except PackageNotFoundError:  # run from its sources
        return "of a checkout"


def launch_facts(result: LaunchResult) -> dict[str, Any]:
    """One launch, ready for JSON."""
    launch = result.launch
    return {
        "kernel": kernel_names.demangled(result.kernel),
        "symbol": result.kernel,
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
        "findings": [_finding_facts(finding) for finding in findings],
        **more,
    }
    return json.dumps(facts, indent=2) + "\n"


def _finding_facts(finding: Finding) -> dict[str, Any]:
    facts = finding.to_json_dict()
    facts["message"] = kernel_names.for_people(finding.message)
    for site in (facts["first"], facts["second"]):
        if site is not None:
            site["kernel"] = kernel_names.demangled(site["kernel"])
    return facts


def seed_facts(seeds: Sequence[int]) -> dict[str, Any]:
    """The seeds of several schedules, ready for JSON; nothing of one."""
    return {"seeds": list(seeds)} if seeds else {}


FAIL_ON = {
    "hardware": "errors that can give wrong results on hardware",
    "isa": "these, and errors that only the ISA's letter forbids",
    "warning": "these, and warnings",
    "never": "only a launch that could not run to its end",
}
"""Causes of exit code 1, by the word that --fail-on takes."""


def codes_of(fail_on: str) -> frozenset[str]:
    """The codes in a list that --fail-on takes: one of FAIL_ON, if any, and codes.

    Raises:
        ValueError: another word is in it, or two of FAIL_ON.
    """
    words = fail_on.split(",")
    codes = frozenset(words) - FAIL_ON.keys()
    if unknown := sorted(codes - LEVELS.keys()):
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(FAIL_ON)}, and no finding's code")
    if sum(word in FAIL_ON for word in words) > 1:
        raise ValueError(f"only one of {', '.join(FAIL_ON)}")
    return codes


def is_failure(findings: Sequence[Finding], fail_on: str) -> bool:
    """Whether there is a finding for which the exit code is to be 1 (`fail_on`: see `codes_of`)."""
    codes = codes_of(fail_on)
    grade = next((word for word in fail_on.split(",") if word in FAIL_ON), "isa")
    grave = [] if grade == "never" else list(FAIL_ON)[: list(FAIL_ON).index(grade) + 1]
    return any((f.kind or f.level) in grave or f.code in codes for f in findings)


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


def grouped(
    findings: Sequence[Finding], *, with_notes: bool, codes: Collection[str] = ()
) -> list[list[Finding]]:
    """The findings by pair of source lines and code, the gravest first; notes of `codes` too."""
    rank = {"hardware": 0, "isa": 1, "warning": 2, "note": 3}
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in findings:
        if finding.level != "note" or with_notes or finding.code in codes:
            about = finding.lines or (finding.message,)
            key = (finding.kind or finding.level, finding.code, *about)
            groups.setdefault(key, []).append(finding)
    return [group for _, group in sorted(groups.items(), key=lambda item: rank[item[0][0]])]


def finding_lines(
    findings: Sequence[Finding],
    *,
    with_notes: bool,
    codes: Collection[str] = (),
    limit: int | None = MOST_SHOWN,
) -> list[str]:
    """One line for each group of findings, the gravest first; at most `limit`.

    It shows the first of the group's findings; a source line may be many instructions. Of notes
    those of `codes` are shown, or all.
    """
    groups = grouped(findings, with_notes=with_notes, codes=codes)
    lines = [_group_line(group) for group in groups[:limit]]
    if limit is not None and len(groups) > limit:
        lines.append(f"... and {len(groups) - limit} more (--all shows them)")
    return lines


def result_lines(options: argparse.Namespace, ran: Ran) -> list[str]:
    """The findings that the options choose, and what failed."""
    limit = None if options.all else MOST_SHOWN
    codes = codes_of(options.fail_on)
    lines = finding_lines(ran.findings, with_notes=options.notes, codes=codes, limit=limit)
    return lines + [f"failed: {kernel_names.for_people(failure)}" for failure in ran.failures]


def _group_line(group: Sequence[Finding]) -> str:
    first = group[0]
    level = "error against the ISA" if first.kind == "isa" else first.level
    texts = {(finding.first, finding.second): finding for finding in group}
    facts = []
    if len(texts) > 1:
        facts.append(f"{len(texts)} such pairs of instructions in these lines")
    if (count := sum(finding.count for finding in group)) > 1:
        facts.append(f"{count} times")
    if first.repeat:
        facts.append(schedule_fact(group))
    return f"{level}: {_text_of(first)}" + (f" [{', '.join(facts)}]" if facts else "")


def seeds_of(group: Sequence[Finding]) -> list[int]:
    """Seeds of the schedules that show a finding of a group."""
    return sorted({seed for finding in group for seed in finding.seeds})


def schedule_fact(group: Sequence[Finding]) -> str:
    """Schedules that show a group of findings, and how to repeat the first finding."""
    first = group[0]
    shown = _counted(first.orders, "order", "orders") if first.orders else ""
    return f"{shown or seed_names(seeds_of(group))}; repeat with {first.repeat}"


def _text_of(finding: Finding) -> str:
    """The finding's line with its kernel's name shortened."""
    site = finding.first or finding.second
    text = finding.message
    if site is not None:
        text = text.replace(f"kernel {site.kernel}:", f"kernel {short_name(site.kernel)}:")
    return kernel_names.for_people(text)


def short_name(kernel: str) -> str:
    """A kernel's name without the types of its arguments."""
    return kernel_names.readable(kernel)


def summary_line(ran: Ran, *, checked: bool) -> str:
    """The last line of a report."""
    launches, findings, failures = ran.launches, ran.findings, ran.failures
    total = ran.unfinished + sum(result.warp_instructions for result in launches)
    parts = [_counted(len(launches), "launch", "launches")]
    if failures:
        ended = "launch" if len(failures) == 1 else "launches"
        parts[0] = f"{parts[0]} ended, {len(failures)} {ended} FAILED"
    parts.append(f"{total} warp instructions")
    line = ", ".join(parts)
    if not checked:
        line += ", not checked"
    else:
        found = Counter(finding.kind or finding.level for finding in findings)
        errors = _counted(found["hardware"] + found["isa"], "error", "errors")
        if found["isa"]:
            errors += f" ({found['isa']} only against the ISA)"
        rest = [_counted(found[name], name, f"{name}s") for name in ("warning", "note")]
        line += f": {', '.join([errors, *rest])}"
    if failures:
        line += f"; failed: {kernel_names.for_people(failures[0].splitlines()[0])}"
    return line


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
