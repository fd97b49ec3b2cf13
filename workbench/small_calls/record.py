"""The launch of a small call as a file, which ptxemu repeats where there is no CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.small_calls.call import Small, emulator_of

if TYPE_CHECKING:
    from ptxemu.launch_setup import LaunchSetup


class _RecordedError(Exception):
    """Ends a call whose kernel has been recorded."""


def record(call: Small, entry: str, path: Path) -> None:
    """Write the call's first launch of a kernel (whose name begins with `entry`) to a file.

    Raises:
        LookupError: it launches none of that name.
    """
    from ptxemu.cli.kernel_names import file_name
    from ptxemu.saved_launch import save_launch

    def on_launch(setup: LaunchSetup) -> None:
        if file_name(setup.kernel).startswith(entry):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_launch(setup, path)
            raise _RecordedError

    try:
        call.launch(emulator_of(call, on_launch=on_launch))
    except _RecordedError:
        return
    raise LookupError(f"{call.name}: launches no {entry}")


def path_of_launch(folder: Path, name: str, number: int) -> Path:
    """The file of a row's call."""
    return folder / f"{name}.{number}.launch"
