"""One run of several (`--seeds`), in a process of its own: options in, an outcome out."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from ptxemu.cli.interruption import interruptible
from ptxemu.cli.outcome import Outcome, Results
from ptxemu.errors import PtxEmuError
from ptxemu.machine.device import limit_sms


def main(request: Path, answer: Path) -> None:
    """Run what `request` holds and write its outcome, or why it cannot be run, to `answer`."""
    _end_with_parent()
    run, options = pickle.loads(request.read_bytes())
    outcome: Outcome | str
    try:
        limit_sms(options.sms)
        with interruptible(None):
            found = run(options)
        results, stopped = Results.of(found.ran), found.interruption
        if stopped is not None:  # why all runs end is the parent's to say
            results.failures = [f for f in results.failures if not f.endswith(stopped.reason)]
        outcome = replace(found, ran=results, interruption=None)
    except (PtxEmuError, ValueError, OSError, MemoryError, RecursionError) as error:
        outcome = str(error) or type(error).__name__
    sys.stdout.flush()
    draft = answer.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(outcome))
    draft.replace(answer)


def _end_with_parent() -> None:
    """Stdin is a pipe that ends when the parent does; what is run has an empty one."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
