"""Pins the dependencies of flashdsa and ptxemu, and checks that they can be installed.

    python tools/dependencies.py pin      # writes constraints.txt; --upgrade takes newer versions
    python tools/dependencies.py check    # the promised versions of Python and torch

Both ask the package registry alone: no configuration of pip or uv on this machine, and no package
that lies on it, takes part. `check` installs nothing. It downloads metadata, for up to two minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = ROOT / "pyproject.toml"
PTXEMU = ROOT / "ptxemu"
CONSTRAINTS = ROOT / "constraints.txt"
HEADER = """\
# The only file that pins versions: what make installs and CI tests on every Python and machine.
# Regenerate it with `make constraints` after a change of dependencies in pyproject.toml.
"""

TORCH_VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
ALL_PINS = ("--all-extras", "--constraint", str(CONSTRAINTS))
WHAT_USERS_INSTALL = ("--extra=cuda", "--extra=emulate", "--extra=hf")
NO_SOLUTION = 1
"""uv's exit status where no set of versions fits; any other failure may be the network's."""
ATTEMPTS = 3
RESOLUTIONS_AT_ONCE = 8


@dataclass(frozen=True)
class Resolution:
    """One question to the resolver: do these dependencies fit together?"""

    title: str
    python: str
    processor: str
    options: tuple[str, ...]
    """Options of `uv pip compile`."""
    requirement: str = ""
    """Beside those of pyproject.toml."""

    def run(self) -> str | None:
        """Resolve; None if a solution exists, else what uv says."""
        options = (*self.options, "--output-file", os.devnull)
        for _ in range(ATTEMPTS):
            done = run_uv(self.python, self.processor, options, self.requirement)
            if done.returncode in (0, NO_SOLUTION):
                break
        return None if done.returncode == 0 else done.stderr.strip()


def run_uv(
    python: str, processor: str, options: tuple[str, ...], requirement: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `uv pip compile` on both pyproject.toml, without any configuration of this machine.

    Only wheels count: a package that has none for this Python would need a compiler. ptxemu is the
    exception, as no registry has it: its folder is read.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_"))}
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet", "--no-header",
        "--no-annotate", "--only-binary", ":all:", "--no-binary", "ptxemu",
        "--python-version", python, "--python-platform", f"{processor}-manylinux_2_28",
        *options, str(PYPROJECT), str(PTXEMU / "pyproject.toml"), "-",
    ]  # fmt: skip
    requirement = f"ptxemu @ {PTXEMU.as_uri()}\n{requirement}"
    return subprocess.run(
        command, env=environment, input=requirement, capture_output=True, text=True, check=False
    )


def list_pythons() -> list[str]:
    """The Python versions that pyproject.toml promises, oldest first."""
    promise = tomllib.loads(PYPROJECT.read_text())["project"]["requires-python"]
    bounds = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", promise)
    if bounds is None:
        raise SystemExit(f"requires-python: expected '>=3.A,<3.B'; got {promise!r}")
    return [f"3.{minor}" for minor in range(int(bounds[1]), int(bounds[2]))]


def list_resolutions() -> Iterator[Resolution]:
    """Everything that a README or guide promises can be installed."""
    pythons = list_pythons()
    for python in pythons:
        yield Resolution("all pins, x86_64", python, "x86_64", ALL_PINS)
    for python in (pythons[0], pythons[-1]):
        yield Resolution("all pins, aarch64", python, "aarch64", ALL_PINS)
        for torch in TORCH_VERSIONS:
            wanted = f"torch=={torch}.*"
            yield Resolution(f"torch {torch}", python, "x86_64", WHAT_USERS_INSTALL, wanted)


def pin(upgrade: bool) -> int:
    """Write constraints.txt: versions stay where they still fit, unless `upgrade`."""
    options = ("--all-extras", "--output-file", str(CONSTRAINTS))
    if upgrade:
        options = (*options, "--upgrade")
    done = run_uv(list_pythons()[0], "x86_64", options)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return 1
    pins = CONSTRAINTS.read_text().splitlines(keepends=True)
    CONSTRAINTS.write_text(HEADER + "".join(pin for pin in pins if not pin.startswith("ptxemu")))
    return 0


def check() -> int:
    """Resolve every promised combination; print a line each."""
    resolutions = list(list_resolutions())
    failures = 0
    with ThreadPoolExecutor(RESOLUTIONS_AT_ONCE) as pool:
        said = pool.map(Resolution.run, resolutions)
        for resolution, problem in zip(resolutions, said, strict=True):
            verdict = "resolves" if problem is None else "FAILS"
            print(f"Python {resolution.python}, {resolution.title}: {verdict}", flush=True)
            if problem is not None:
                failures += 1
                print(problem, flush=True)
    print(f"{len(resolutions) - failures} of {len(resolutions)} combinations resolve")
    return 1 if failures else 0


def main() -> int:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    pinning = commands.add_parser("pin", help="write constraints.txt")
    pinning.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    commands.add_parser("check", help="resolve every promised combination")
    arguments = parser.parse_args()
    return pin(arguments.upgrade) if arguments.command == "pin" else check()


if __name__ == "__main__":
    sys.exit(main())
