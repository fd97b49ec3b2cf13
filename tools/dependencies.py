"""Pins the dependencies of flashdsa and ptxemu, and checks that they can be installed.

    python tools/dependencies.py pin      # writes constraints.txt; --upgrade takes newer versions
    python tools/dependencies.py check    # the promised versions of Python and torch
    python tools/dependencies.py newest   # tests with the lowest and the newest allowed releases

All ask the package registry alone: no configuration of pip or uv on this machine, and no package
that lies on it, takes part. `check` installs nothing. It downloads metadata, for up to two minutes.

`newest` takes seconds where no release is newer than those that docs/guides/serving.md says were
tried. Else it runs tests with them, beside the environment's own packages: torch and CuTe DSL,
which are gigabytes, stay those that are installed. A registry that does not answer fails nothing.
`--record` runs the tests in any case and writes into that page what passed, and when.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

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
ENGINES = ("vllm==0.33.0", "sglang==0.5.23", "sglang==0.5.13")
"""Serving engines that docs/guides/serving.md has, each beside flashdsa."""
OVERRIDES = {"sglang==0.5.13": "apache-tvm-ffi>=0.1.11,<0.2"}
"""Replacements of an engine's own requirements, as that page has them."""
ENGINES_PYTHON, ENGINES_PLATFORM = "3.12", "manylinux_2_34"
NO_SOLUTION = 1
"""uv's exit status where no set of versions fits; any other failure may be the network's."""
RECORD = ROOT / "docs" / "guides" / "serving.md"
RECORDED = re.compile(r"(?<=<!-- newest -->)(\S+) \((.*)\)(?=<!-- /newest -->)")
"""Date of the last trial, and the newest releases then: the only record of both."""
OF_TRITON = [str(path.relative_to(ROOT)) for path in ROOT.glob("tests/backends/test_triton*.py")]
"""Tests of kernels that Triton compiles: each torch brings another release of it."""
TESTS = {
    "lowest-direct": ["tests/integrations", *OF_TRITON],
    # click's test client is another before 8.2
    "highest": ["tests/integrations", *OF_TRITON, "tests/cli"],
}
"""Tests to run, by uv's name of how a release is chosen."""
EXTRAS = ("hf", "triton")
"""Extras whose releases are tried."""
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
    override: str = ""
    """A requirement that replaces those of the same package."""
    platform: str = "manylinux_2_28"

    def run(self) -> str | None:
        """Resolve; None if a solution exists, else what uv says."""
        with TemporaryDirectory() as folder:
            overrides = Path(folder, "overrides.txt")
            overrides.write_text(self.override)
            options = ("--output-file", os.devnull, "--override", str(overrides), *self.options)
            asked = (self.python, f"{self.processor}-{self.platform}", options, self.requirement)
            for _ in range(ATTEMPTS):
                done = run_uv(*asked)
                if done.returncode in (0, NO_SOLUTION):
                    break
        return None if done.returncode == 0 else done.stderr.strip()


def run_uv(
    python: str, platform: str, options: tuple[str, ...], requirement: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `uv pip compile` on both pyproject.toml, without any configuration of this machine.

    Only wheels count: a package that has none for this Python would need a compiler. ptxemu is the
    exception, as no registry has it: its folder is read.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_"))}
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet", "--no-header",
        "--no-annotate", "--only-binary", ":all:", "--no-binary", "ptxemu",
        "--python-version", python, "--python-platform", platform,
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
    for engine in ENGINES:
        override = OVERRIDES.get(engine, "")
        options = (ENGINES_PYTHON, "x86_64", (), engine, override, ENGINES_PLATFORM)
        yield Resolution(engine, *options)


def pin(upgrade: bool) -> int:
    """Write constraints.txt: versions stay where they still fit, unless `upgrade`."""
    options = ("--all-extras", "--output-file", str(CONSTRAINTS))
    if upgrade:
        options = (*options, "--upgrade")
    done = run_uv(list_pythons()[0], "x86_64-manylinux_2_28", options)
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


def newest(record: bool) -> int:
    """Run `TESTS` if a release is newer than the recorded ones, or to record those that pass."""
    with TemporaryDirectory() as folder:
        try:
            direct = name_direct(resolve_without_torch(list_pythons()[0], "highest", folder))
            if not record and direct == read_record()[1]:
                print(f"nothing is newer than what was tried: {direct}")
                return 0
            for resolution, tests in TESTS.items():
                python = f"3.{sys.version_info.minor}"
                pins = resolve_without_torch(python, resolution, folder)
                packages = install(pins, Path(folder, resolution))
                print(f"with {name_direct(pins)}:", flush=True)
                paths = os.pathsep.join(map(str, (packages, ROOT / "src", PTXEMU / "src")))
                command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *tests]
                environment = {**os.environ, "PYTHONPATH": paths}
                if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
                    print("FAILS with these releases, which pyproject.toml allows")
                    return 1
        except subprocess.CalledProcessError as error:
            print(f"{error.stderr}\nThe registry does not answer: no newest release was tried.")
            return 0
    if record:
        said = f"{date.today()} ({direct})"
        RECORD.write_text(RECORDED.sub(said, RECORD.read_text()))
    else:
        print("passed; to record it: .venv/bin/python tools/dependencies.py newest --record")
    return 0


def read_record() -> tuple[str, str]:
    """Date and releases of `RECORD`."""
    found = RECORDED.search(RECORD.read_text())
    if found is None:
        raise SystemExit(f"{RECORD}: expected a line with {RECORDED.pattern}")
    return found[1], found[2]


def resolve_without_torch(python: str, resolution: str, folder: str) -> list[str]:
    """Pins of what flashdsa and its `EXTRAS` need, save torch."""
    excludes = Path(folder, "excludes.txt")
    excludes.write_text("torch")
    extras = (f"--extra={name}" for name in EXTRAS)
    options = (*extras, "--excludes", str(excludes), "--resolution", resolution)
    done = run_uv(python, f"{platform.machine()}-manylinux_2_28", options)
    if done.returncode == NO_SOLUTION:
        raise SystemExit(done.stderr)
    done.check_returncode()
    return [pin for pin in done.stdout.splitlines() if "==" in pin]


def name_direct(pins: list[str]) -> str:
    """Those of the pins that pyproject.toml names, as a list in words."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = (project["optional-dependencies"][name] for name in EXTRAS)
    wanted = chain(project["dependencies"], *extras)
    names = {re.split(r"[<>=!~\[;]", one)[0] for one in wanted}
    return ", ".join(pin.replace("==", " ") for pin in pins if pin.split("==")[0] in names)


def install(pins: list[str], folder: Path) -> Path:
    """Install the pins, and nothing that they need, into the folder."""
    command = [
        sys.executable, "-m", "uv", "pip", "install", "--no-config", "--quiet", "--no-deps",
        "--only-binary", ":all:", "--python", sys.executable, "--target", str(folder), *pins,
    ]  # fmt: skip
    subprocess.run(command, capture_output=True, text=True, check=True)
    return folder


def main() -> int:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    pinning = commands.add_parser("pin", help="write constraints.txt")
    pinning.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    commands.add_parser("check", help="resolve every promised combination")
    trying = commands.add_parser("newest", help="run tests with releases that were not tried yet")
    trying.add_argument("--record", action="store_true", help="in any case; write down what passed")
    arguments = parser.parse_args()
    if arguments.command == "pin":
        return pin(arguments.upgrade)
    return newest(arguments.record) if arguments.command == "newest" else check()


if __name__ == "__main__":
    sys.exit(main())
