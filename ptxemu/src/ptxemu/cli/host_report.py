"""The report on a run of host code: as text, JSON, JUnit and SARIF; and its launches as files."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ptxemu.check import Finding
from ptxemu.check.findings import Site
from ptxemu.cli import report
from ptxemu.cli.help_text import folded
from ptxemu.cli.hosts import How, compiled, run_host
from ptxemu.cli.interruption import interruptible
from ptxemu.cli.kernel_names import file_name, for_people
from ptxemu.cli.kinds import SOURCE
from ptxemu.cli.merging import seed_names
from ptxemu.cli.options import policy_of
from ptxemu.cli.outcome import Outcome, Ran
from ptxemu.cli.output_paths import output_file, write_file, write_file_or_stdout
from ptxemu.cli.progress import Progress
from ptxemu.cli.schedules import run_all
from ptxemu.cli.terminal import write_err, write_out
from ptxemu.errors import LaunchError
from ptxemu.launch_setup import LaunchSetup, OnLaunch
from ptxemu.saved_launch import SUFFIX, save_launch

# Reports that other tools read: JUnit for test views, SARIF for annotations of source lines.

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


class SavedLaunches:
    """Writes launches into a folder; `save` is an `OnLaunch`."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        """Messages for people: what was written and what could not be."""
        self._folder = folder
        self._count = 0

    def save(self, setup: LaunchSetup) -> None:
        """Write one launch to a file of its own."""
        number, self._count = self._count, self._count + 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{file_name(setup.kernel)}.{number}{SUFFIX}"
        try:
            save_launch(setup, path)
        except LaunchError as error:
            self.notes.append(f"not saved: {error}")
        else:
            self.notes.append(f"saved {path} ({path.stat().st_size:,} bytes)")


def carry_out_host(options: argparse.Namespace) -> int:
    """Run host code under the schedules that are asked for, and report; returns the exit code.

    Of the options `script` is the host code, and `json` a file for the report, "-" for stdout.
    """
    started = time.monotonic()
    with interruptible(options.time_limit), ExitStack() as stack:
        if options.seeds is not None and options.script.endswith(SOURCE):
            options.program = stack.enter_context(compiled(options.script, _how(options)))
        run = run_all(options, _run_once, output_to_stderr=options.json == "-")
    return _give_report(options, run, time.monotonic() - started)


def _run_once(options: argparse.Namespace) -> Outcome:
    """Run host code, and write its launches into a folder, if there is one."""
    command = [options.script, *options.arguments]
    if options.save is None:
        return run_host(command, _how(options))
    saved = SavedLaunches(options.save)
    run = run_host(command, _how(options, saved.save))
    run.ran.notes.extend(saved.notes)
    return run


def _how(options: argparse.Namespace, on_launch: OnLaunch | None = None) -> How:
    return How(
        *(options.arch, options.check, policy_of(options), Progress(quiet=options.quiet)),
        on_launch,
        options.nvcc,
        options.is_module,
        leaves_stdout=options.json == "-",
        unchecked=options.unchecked,
        program=options.program,
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """The options that write the report to files that other tools read, and what it needs."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--require-launch",
        action="store_true",
        help="of a script, too, exit code 1 if no launch of a kernel ran to its end, as where a\n"
        "test skips all that needs a GPU",
    )
    either.add_argument(
        "--allow-no-launch",
        action="store_true",
        help="of a program with kernels in it, too, exit code 0 without a launch; of any program\n"
        "that check or run runs",
    )
    parser.add_argument(
        "--junit",
        type=output_file,
        metavar="FILE",
        help="write a JUnit report, a test for each launch",
    )
    parser.add_argument(
        "--sarif",
        type=output_file,
        metavar="FILE",
        help="write the findings as SARIF, by source line",
    )


def _give_report(options: argparse.Namespace, run: Outcome, seconds: float) -> int:
    """Write all reports that the options ask for; returns the exit code."""
    sys.stdout.flush()
    stopped = run.interruption
    if stopped is not None:
        write_err(f"ptxemu: {stopped.reason}\n")
        if not run.ran.failures:
            run.ran.failures.append(f"{run.name}: {stopped.reason}")
    elif run.error is not None:
        write_err(run.error.rstrip("\n") + "\n")
    is_required = options.require_launch or (run.has_kernels and not options.allow_no_launch)
    ran = run.ran
    is_idle = stopped is None and not (ran.launches or ran.failures or run.exit_code)
    if is_idle and options.is_check and run.has_kernels is False and not options.allow_no_launch:
        raise LaunchError(
            f"{run.name} launched no kernel and has no code of nvcc's in it: is it the right file? "
            "(--allow-no-launch, if it is)"
        )
    if is_required and is_idle:
        way = "" if options.require_launch else " (--allow-no-launch, if that is right)"
        ran.failures.append(f"{run.name}: no launch of a kernel ran to its end{way}")
    if options.json is not None:
        write_file_or_stdout(options.json, _json(run, seconds))
    if options.junit is not None:
        text = junit(run.name, run.ran, run.exit_code, seconds, fail_on=options.fail_on)
        write_file(options.junit, text)
    if options.sarif is not None:
        write_file(options.sarif, sarif(run.ran))
    if options.json != "-":
        write_out(_text(options, run, seconds))
    return run.exit_code or int(_is_failure(run, options.fail_on))


def _is_failure(run: Outcome, fail_on: str) -> bool:
    """Whether the exit code is to be 1 though the host code ended well."""
    return bool(run.ran.failures) or report.is_failure(run.ran.findings, fail_on)


def _json(run: Outcome, seconds: float) -> str:
    return report.as_json(
        run.ran.launches,
        run.ran.findings,
        failures=list(map(for_people, run.ran.failures)),
        notes=list(map(for_people, run.ran.notes)),
        script=run.name,
        arch=run.arch,
        exit_code=run.exit_code,
        error=run.error,
        stopped=None if run.interruption is None else run.interruption.reason,
        seconds=round(seconds, 3),
        **report.seed_facts(run.seeds),
    )


def _text(options: argparse.Namespace, run: Outcome, seconds: float) -> str:
    ran = run.ran
    tried = f", {len(run.seeds)} schedules: {seed_names(run.seeds)}" if run.seeds else ""
    lines = ["", f"ptxemu: {run.name} on {run.arch}, {seconds:.1f} s{tried}"]
    lines += report.launch_lines(ran.launches)
    lines += [f"note: {for_people(note)}" for note in ran.notes]
    lines += report.result_lines(options, ran)
    if run.exit_code:
        lines.append(f"{run.name} ended with exit code {run.exit_code}")
    lines.append(report.summary_line(ran, checked=options.check))
    return "\n".join(folded(lines)) + "\n"
