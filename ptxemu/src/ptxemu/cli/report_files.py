"""Reports that other tools read: JUnit for test views, SARIF for annotations of source lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from ptxemu.check import Finding
from ptxemu.check.findings import Site
from ptxemu.cli import report
from ptxemu.cli.kernel_names import for_people
from ptxemu.cli.outcome import Ran

_SARIF_LEVELS = {"error": "error", "warning": "warning", "note": "note"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def junit(name: str, ran: Ran, exit_code: int, seconds: float, *, fail_on: str) -> str:
    """A suite for one run of host code: a test for each launch, one for the host code.

    A launch fails where it has a finding that `fail_on` counts, with the findings as its text;
    a launch that could not run to its end is an error.
    """
    suite = ElementTree.Element("testsuite", name=name, time=f"{seconds:.3f}")
    failures = errors = 0
    for number, result in enumerate(ran.launches):
        case = _case(suite, name, f"launch {number}: {report.short_name(result.kernel)}")
        case.set("time", f"{result.seconds:.3f}")
        if report.is_failure(result.findings, fail_on):
            failures += 1
            codes = report.codes_of(fail_on)
            lines = report.finding_lines(result.findings, with_notes=False, codes=codes, limit=None)
            ElementTree.SubElement(case, "failure", message=lines[0]).text = "\n".join(lines)
    for failure in map(for_people, ran.failures):
        errors += 1
        case = _case(suite, name, failure.split(":", 1)[0])
        ElementTree.SubElement(case, "error", message=failure.splitlines()[0]).text = failure
    case = _case(suite, name, "exit code of the host code")
    if exit_code:
        failures += 1
        ElementTree.SubElement(case, "failure", message=f"exit code {exit_code}")
    if ran.notes:
        ElementTree.SubElement(case, "system-out").text = for_people("\n".join(ran.notes))
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(failures))
    suite.set("errors", str(errors))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, name: str, what: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=name, name=what)


def sarif(ran: Ran) -> str:
    """The findings as SARIF 2.1.0: a result for each pair of source lines and code.

    A finding without source lines (no -lineinfo) has no location, only its text.
    """
    groups = report.grouped(ran.findings, with_notes=True)
    rules = sorted({group[0].code for group in groups})
    tool = {
        "name": "ptxemu",
        "version": report.own_version(),
        "rules": [{"id": code} for code in rules],
    }
    told = [{"level": "note", "message": {"text": for_people(note)}} for note in ran.notes]
    invocation = {"executionSuccessful": not ran.failures, "toolExecutionNotifications": told}
    results = [_result(group) for group in groups]
    results += [
        {"ruleId": "launch-failed", "level": "error", "message": {"text": for_people(failure)}}
        for failure in ran.failures
    ]
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": tool}, "invocations": [invocation], "results": results}],
    }
    return json.dumps(log, indent=2) + "\n"


def _result(group: Sequence[Finding]) -> dict[str, Any]:
    first = group[0]
    result: dict[str, Any] = {
        "ruleId": first.code,
        "level": _SARIF_LEVELS[first.level],
        "message": {"text": for_people(first.message)},
        "occurrenceCount": sum(finding.count for finding in group),
    }
    if first.seeds:
        facts = report.schedule_fact(group)
        result["message"]["text"] += f" [{facts}]"
        result["properties"] = {"seeds": report.seeds_of(group), "repeat": first.repeat}
    sites = [site for site in (first.second, first.first) if site is not None]
    places = [place for site in sites if (place := _location(site)) is not None]
    if places:
        result["locations"] = places[:1]
        result["relatedLocations"] = places[1:]
    return result


def _location(site: Site) -> dict[str, Any] | None:
    if site.source_file is None or site.source_line is None:
        return None
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": for_people(site.source_file)},
            "region": {"startLine": max(site.source_line, 1)},
        },
        "message": {"text": for_people(str(site))},
    }
