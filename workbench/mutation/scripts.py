"""What workbench/mutation/kernels.py repeats of a kernel: launches of a script, or of a call."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.mutation.calls import Call

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Script:
    """Runs a script, on what calls itself a GPU.

    Attributes:
        path: from the repository's top; `$CUTLASS` in it is a checkout of that project.
        sms: streaming multiprocessors; 0: as many as such a GPU has.
    """

    arch: str
    path: str
    arguments: tuple[str, ...]
    sms: int = 0

    def __str__(self) -> str:
        """As the results name it."""
        return " ".join((self.path, *self.arguments))

    def save(self, kernels: Mapping[str, Path]) -> None:
        """Write the first launch of each kernel (whose name begins so) to its file."""
        with tempfile.TemporaryDirectory() as folder:
            command = ["-m", "ptxemu", "exec", "--arch", self.arch, "--quiet", "--no-check"]
            command += ["--sms", str(self.sms)] if self.sms else []
            command += ["--save", folder, os.path.expandvars(self.path), *self.arguments]
            run = [sys.executable, *command]
            subprocess.run(run, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            for entry, path in kernels.items():
                first = min(Path(folder).glob(f"{entry}*.launch"))
                path.write_bytes(first.read_bytes())


@dataclass(frozen=True)
class Launches:
    """Which launches of a kernel are repeated with each mutant.

    Attributes:
        entry: the kernel's name begins so; of a script's launches, a pattern of the files' names.
        origins: make a launch of it each: what one does not need, another one may.
        scratch: arrays in which the kernel leaves what depends on the schedule, as ptxemu names
            them.
        ignored: codes of findings that come and go with the schedule in the original, too.
        lanes_apart: a warp's lanes go apart, and bar.warp.sync is broken, too.
    """

    entry: str
    origins: tuple[Script | Call, ...]
    scratch: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("unordered-float-additions",)
    lanes_apart: bool = False

    @property
    def command(self) -> str:
        """All launches, as the results name them."""
        return "; ".join(map(str, self.origins))


def scripted(arch: str, path: str, *arguments: str, sms: int = 0) -> tuple[Script, ...]:
    """A script's launches, of arguments with blanks between them each."""
    return tuple(Script(arch, path, tuple(one.split()), sms) for one in arguments)
