"""Signals and the time limit: they end a command in the middle, and the report still comes."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ptxemu.errors import Interruption

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TIME_LIMIT_CODE = 124
"""Exit code of a command whose time was over, as `timeout` has it."""


def add_time_limit_option(parser: argparse.ArgumentParser) -> None:
    """The option that ends a run after some time."""
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        metavar="SECONDS",
        help="stop then and report what was found until then (exit code 124)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0; got {text!r}")
    return seconds


@contextmanager
def interruptible(time_limit: float | None) -> Iterator[None]:
    """The first signal, or the end of the time, raises an Interruption; the next does as ever.

    Signals that this process ignores stay ignored. In another thread than the first one nothing is
    changed, as Python handles signals there alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.getsignal(one) for one in _SIGNALS}
    before = {one: handler for one, handler in before.items() if handler != signal.SIG_IGN}

    def restore() -> None:
        for one, handler in before.items():
            signal.signal(one, handler)
        if time_limit is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def stop(number: int, frame: FrameType | None) -> None:
        restore()
        if number == signal.SIGALRM:
            raise Interruption(f"stopped, as --time-limit {time_limit:g} says", _TIME_LIMIT_CODE)
        name = signal.Signals(number).name
        reason = "interrupted" if number == signal.SIGINT else f"stopped by {name}"
        raise Interruption(reason, 128 + number)

    for one in before:
        signal.signal(one, stop)
    alarm = None
    if time_limit is not None:
        alarm = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, time_limit)
    try:
        yield
    finally:
        restore()
        if alarm is not None:
            signal.signal(signal.SIGALRM, alarm)
