"""`--seeds N`: one command under N schedules, each in a process of its own, and one report."""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ptxemu.cli.merging import Tried, merged
from ptxemu.cli.outcome import Outcome, Results
from ptxemu.cli.terminal import write_err
from ptxemu.errors import Interruption, PtxEmuError

ASYNCHRONOUS = ("random", "late", "slow", "eager")
"""Times of asynchronous work that the seeds go round, unless --async chooses one."""
_PATIENCE_SECONDS = 5.0
"""Time that runs have to write what they have found, when all are to end."""
_SECONDS_BETWEEN_LOOKS = 0.02
_SHOWN_LINES = 20
"""Last lines of a failed run's output."""
_EVERY_SECONDS_IN_A_PIPE = 10.0
Run = Callable[[argparse.Namespace], Outcome]


class ScheduleError(PtxEmuError):
    """A run could not be carried out; says what its process said."""


@dataclass
class _Process:
    """A run under way."""

    tried: Tried
    process: subprocess.Popen[bytes]
    answer: Path
    output: Path | None
    """The host code's output; None: where this process's goes."""


def add_seeds_option(parser: argparse.ArgumentParser) -> None:
    """The option that asks for several schedules."""
    parser.add_argument(
        "--seeds",
        type=positive,
        metavar="N",
        help="run under N schedules, of seeds from --seed on, as many at once as there are cores;\n"
        "the report says which seeds show a finding, and repeats it with one of them\n"
        f"(asynchronous work is {', '.join(ASYNCHRONOUS)} in turn, unless --async says)",
    )


def positive(text: str) -> int:
    """A number of runs, as argparse takes it."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number; got {text!r}")
    return int(text)


def run_all(options: argparse.Namespace, run: Run, *, output_to_stderr: bool) -> Outcome:
    """Run a command under the schedules that its options ask for; one where they ask for none.

    Args:
        run: runs it under one schedule; a function of a module, which other processes find.
        output_to_stderr: stdout is the report's.

    Raises:
        ScheduleError: a run cannot be carried out, as where a file is missing.
    """
    if options.seeds is None:
        return run(options)
    with tempfile.TemporaryDirectory(prefix="ptxemu-seeds-") as folder:
        crowd = _Crowd(options, run, Path(folder), output_to_stderr=output_to_stderr)
        try:
            interruption = crowd.run()
        finally:
            crowd.kill()
        return replace(merged(crowd.done), interruption=interruption)


def schedules(options: argparse.Namespace) -> Iterator[Tried]:
    """The schedules that the options ask for."""
    for number in range(options.seeds):
        turn = ASYNCHRONOUS[number % len(ASYNCHRONOUS)]
        yield Tried(options.seed + number, options.asynchronous or turn)


class _Crowd:
    """The runs of a command."""

    def __init__(
        self, options: argparse.Namespace, run: Run, folder: Path, *, output_to_stderr: bool
    ) -> None:
        self.done: list[Tried] = []
        """Runs that have ended, in the order of their seeds."""
        self._options = options
        self._run_function = run
        self._folder = folder
        self._output_to_stderr = output_to_stderr
        self._waiting = list(schedules(options))
        self._running: list[_Process] = []
        self._shown_at = time.monotonic()

    def run(self) -> Interruption | None:
        """Run all to their ends, or until a signal or the time limit ends them."""
        try:
            with self._progress():
                self._wait_for_all()
        except KeyboardInterrupt as stop:
            self._waiting.clear()
            for one in self._running:
                one.process.terminate()
            until = time.monotonic() + _PATIENCE_SECONDS
            while self._running and time.monotonic() < until:
                self._collect()
            if isinstance(stop, Interruption):
                return stop
            return Interruption("interrupted", 128 + signal.SIGINT)
        return None

    def kill(self) -> None:
        """End what is left."""
        for one in self._running:
            one.process.kill()
            one.process.wait()

    def _wait_for_all(self) -> None:
        most = len(os.sched_getaffinity(0))
        while self._waiting or self._running:
            while self._waiting and len(self._running) < most:
                self._start(self._waiting.pop(0))
            self._collect()
            self._tell()

    def _start(self, tried: Tried) -> None:
        """Start a run; the output of the first one is this command's."""
        request, answer = (self._folder / f"{tried.seed}.{kind}" for kind in ("request", "answer"))
        options = argparse.Namespace(**vars(self._options))
        options.seed, options.asynchronous, options.seeds = tried.seed, tried.asynchronous, None
        options.processes, options.quiet, options.time_limit = 1, True, None
        request.write_bytes(pickle.dumps((self._run_function, options)))
        is_first = tried.seed == self._options.seed
        output = None if is_first else self._folder / f"{tried.seed}.output"
        command = [sys.executable, "-m", "ptxemu.cli.one_schedule", str(request), str(answer)]
        own = sys.stderr if self._output_to_stderr else sys.stdout
        sys.stdout.flush()
        with open(output or os.devnull, "wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # whose end tells it that this process has ended
                stdout=_descriptor(own) if is_first else file,
                stderr=None if is_first else subprocess.STDOUT,
                start_new_session=True,  # so that a signal to the group comes to this one alone
            )
        self._running.append(_Process(tried, process, answer, output))

    def _collect(self) -> None:
        """Take what has ended, or wait a little."""
        ended = [one for one in self._running if one.process.poll() is not None]
        for one in ended:
            self._running.remove(one)
            assert one.process.stdin is not None
            one.process.stdin.close()
            one.tried.outcome = self._outcome(one)
            self.done.append(one.tried)
            self.done.sort(key=lambda tried: tried.seed)
        if not ended:
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _outcome(self, one: _Process) -> Outcome:
        if one.answer.exists():
            answer: Outcome | str = pickle.loads(one.answer.read_bytes())
            if isinstance(answer, str):
                raise ScheduleError(answer)
            if answer.exit_code:
                _show(one)
            return answer
        _show(one)
        code = one.process.returncode
        failure = f"seed {one.tried.seed}: its process ended with code {code}"
        return Outcome("", "", 0, Results(failures=[failure]))

    @contextmanager
    def _progress(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._is_shown:
                sys.stderr.write("\r\033[K")
                sys.stderr.flush()

    @property
    def _is_shown(self) -> bool:
        return not self._options.quiet and sys.stderr.isatty()

    def _tell(self) -> None:
        """Say how far it is: one line of a terminal, elsewhere a line now and then."""
        now = time.monotonic()
        every = 0.5 if sys.stderr.isatty() else _EVERY_SECONDS_IN_A_PIPE
        if self._options.quiet or now - self._shown_at < every:
            return
        self._shown_at = now
        findings = [f for tried in self.done if tried.outcome for f in tried.outcome.ran.findings]
        errors = any(finding.level == "error" for finding in findings)
        text = f"{len(self.done)} of {self._options.seeds} schedules"
        text += f", {len(self._running)} under way{', errors found' if errors else ''}"
        sys.stderr.write(f"\r\033[K{text}" if self._is_shown else f"{text}\n")
        sys.stderr.flush()


def _show(one: _Process) -> None:
    """The end of the output of a run that failed, which nobody has seen."""
    if one.output is None:
        return
    lines = one.output.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
    text = "".join(f"  {line}\n" for line in lines)
    write_err(f"ptxemu: end of the output with seed {one.tried.seed}:\n{text}")


def _descriptor(stream: object) -> int | None:
    """The file of a stream; None where it has none of its own, as in a test."""
    try:
        return stream.fileno()  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, OSError):
        return None
