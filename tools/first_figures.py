"""Measures the sizes and times that the first pages tell.

    python -m tools.first_figures [NAME ...] [--torch WHEEL]

Each NAME of `PLANS` is measured in a fresh clone of HEAD, without the cache and any configuration
of pip on this machine, and becomes an entry of workbench/results/first_figures.json;
`tools/result_tables.py` writes the pages from it. Without NAME all are measured: some 20 GB and an
hour. CPU seconds hardly depend on the machine's other work. Wall seconds do, so the machine's load
stands beside them and pages show them only for a quiet machine. `--torch` names a wheel of
PyTorch's CPU build, for machines that cannot reach its index.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "workbench" / "results" / "first_figures.json"
UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6}
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Plan:
    """A command to measure, after others that make its set-up.

    Attributes:
        setup: not timed.
        environment: of Python, relative to the clone; its size is measured.
        cpu_torch: whether PyTorch's CPU build is installed.
    """

    command: str
    setup: str = "true"
    environment: str = ".venv"
    cpu_torch: bool = True


PLANS = {
    "pip": Plan(
        "env/bin/pip install $TORCH && env/bin/pip install .", "$PYTHON -m venv env", "env"
    ),
    "pip cuda": Plan("env/bin/pip install '.[cuda]'", "$PYTHON -m venv env", "env", False),
    "make": Plan("make setup"),
    "make cuda": Plan("make setup", cpu_torch=False),
    "demo": Plan("make demo", "make setup"),
    "test": Plan("make test", "make setup"),
}


@dataclass(frozen=True)
class Figures:
    """One measurement.

    Attributes:
        installed_bytes: of the environment's files, in blocks of the disk.
        downloaded_bytes: of packages and metadata, by set-up and command; None: not recorded.
        wall_seconds, cpu_seconds: of the command alone.
        cores, load: of the machine; the load average of the minute before. None: it was idle, as
            who measured by hand says.
    """

    date: str
    commit: str
    python: str
    installed_bytes: int
    downloaded_bytes: int | None
    wall_seconds: float
    cpu_seconds: float
    cores: int
    load: float | None

    @property
    def is_quiet(self) -> bool:
        """Whether little else ran, so that the wall time tells something."""
        return self.load is None or self.load < 0.5 * self.cores


def measure(plan: Plan, torch_wheel: Path | None) -> Figures:
    """Run the plan in a fresh clone.

    Raises:
        CalledProcessError: a command failed.
    """
    with tempfile.TemporaryDirectory(prefix="first-") as folder:
        clone, log = Path(folder, "clone"), Path(folder, "pip.log")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        environment = clean_environment() | {"PIP_LOG": str(log), "PYTHON": sys.executable}
        downloaded = 0
        if plan.cpu_torch and torch_wheel:
            environment |= {"PIP_FIND_LINKS": str(torch_wheel.parent), "TORCH": str(torch_wheel)}
            downloaded = torch_wheel.stat().st_size
        elif plan.cpu_torch:
            environment["PIP_EXTRA_INDEX_URL"] = CPU_INDEX
            environment["TORCH"] = f"torch --index-url {CPU_INDEX}"
        run(plan.setup, clone, environment)
        load, cpu, wall = os.getloadavg()[0], cpu_seconds(), time.monotonic()
        run(plan.command, clone, environment)
        wall, cpu = time.monotonic() - wall, cpu_seconds() - cpu
        return Figures(
            date=str(date.today()),
            commit=head(),
            python=platform.python_version(),
            installed_bytes=disk_bytes(clone / plan.environment),
            downloaded_bytes=downloaded + logged_bytes(log.read_text()),
            wall_seconds=round(wall, 1),
            cpu_seconds=round(cpu, 1),
            cores=os.cpu_count() or 1,
            load=round(load, 1),
        )


def clean_environment() -> dict[str, str]:
    """This process's variables without those that direct Python or pip elsewhere."""
    own = ("PIP_", "PYTHON", "VIRTUAL_ENV", "MAKE", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return kept | {
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def run(command: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a line of bash; its output goes to stderr."""
    words = ["bash", "-ec", command]
    subprocess.run(words, cwd=folder, env=environment, stdout=sys.stderr, check=True)


def cpu_seconds() -> float:
    """CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def disk_bytes(folder: Path) -> int:
    """Bytes that a folder's files take on the disk; links count once, as nothing."""
    files = (path.lstat() for path in folder.rglob("*") if not path.is_symlink())
    return 512 * sum({one.st_ino: one.st_blocks for one in files}.values())


def logged_bytes(log: str) -> int:
    """Sum what pip says that it downloaded: "Downloading NAME (5.5 MB)"."""
    found = re.findall(r" Downloading \S+ \(([\d.]+) (bytes|kB|MB)\)", log)
    return round(sum(float(number) * UNITS[unit] for number, unit in found))


def head() -> str:
    """Return the commit of the checkout, ten digits of it."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def read_record() -> dict[str, Figures]:
    """Return the newest measurement of each name."""
    found = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {name: Figures(**figures) for name, figures in found.items()}


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PLANS))
    parser.add_argument("--torch", type=Path, help="a wheel of PyTorch's CPU build")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PLANS):
        parser.error(f"NAME: expected {', '.join(PLANS)}; got {', '.join(sorted(unknown))}")
    for name in arguments.names or PLANS:
        figures = measure(PLANS[name], arguments.torch)
        found = {key: asdict(one) for key, one in read_record().items()} | {name: asdict(figures)}
        RECORD.write_text(json.dumps(found, indent=2) + "\n")
        print(f"{name}: {figures}", flush=True)


if __name__ == "__main__":
    main()
