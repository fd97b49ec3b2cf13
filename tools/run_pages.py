"""Runs each page's commands and Python where only what the page installs is installed.

    python -m tools.run_pages [PAGE ...]

The other tests of pages run where every extra is. For each page with a `pip install` among its
commands: a copy of the checkout, a fresh environment, no CUDA toolkit on PATH. Needs a registry;
prints each command's exit code, and exits with 1 if one was another than the page promises.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from tests.docs.test_documents import NOT_RUN, PROGRAMS, ROOT, python_blocks

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = tuple(start for start in NOT_RUN if start not in ("pip install", "flashdsa bench"))
SHOWN_LINES = 15


def pages() -> list[Path]:
    """The pages that install something."""
    every = [ROOT / "README.md", ROOT / "ptxemu" / "README.md"]
    every += sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "ptxemu" / "docs").rglob("*.md")])
    return [page for page in every if any("pip install" in line for line, _ in commands(page))]


def commands(page: Path) -> Iterator[tuple[str, int]]:
    """The commands of a page, each with the exit code that it promises.

    The page shows the output of a block's last command in the next block without a language.
    """
    blocks = BLOCK.findall(page.read_text())
    for number, (kind, block) in enumerate(blocks):
        if kind != "bash":
            continue
        behind = takewhile(lambda one: one[0] != "bash", blocks[number + 1 :])
        shown = next((text for language, text in behind if not language), "")
        lines = block.replace("\\\n", "").splitlines()
        lines = [line for line in lines if line and not line.startswith("#")]
        for line in lines:
            named = re.search(r"# exit code (\d+)", line)
            shows_error = line is lines[-1] and "\nerror: " in shown
            yield line, int(named[1]) if named else int(shows_error)


def run_page(page: Path, folder: Path) -> list[str]:
    """The commands of a page that end otherwise than it promises; `folder` is an empty one."""
    checkout, bin_folder = folder / "checkout", folder / "venv" / "bin"
    _copy_checkout(checkout)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    own = {"PYTHONPATH", "VIRTUAL_ENV", "CUDA_PATH"}
    environment = {name: value for name, value in os.environ.items() if name not in own} | {
        "PATH": f"{bin_folder}:/usr/bin:/bin",
        "HOME": str(folder),
        "CUDA_HOME": str(folder / "no toolkit"),
        "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip")),
    }
    wrong = []
    program = "\n".join(python_blocks(page))
    runs = [(["bash", "-ec", line], line, code) for line, code in commands(page)]
    if program and page.relative_to(ROOT).as_posix() not in PROGRAMS:
        (folder / "blocks.py").write_text(program)
        runs.append((["python", str(folder / "blocks.py")], "its Python", 0))
    for words, line, code in runs:
        if line.startswith(LEFT_OUT):
            print(f"  left out: {line}")
            continue
        start = time.monotonic()
        done = subprocess.run(
            [str(bin_folder / words[0]) if words[0] == "python" else words[0], *words[1:]],
            cwd=checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(f"  {done.returncode}, {time.monotonic() - start:.0f} s: {line}", flush=True)
        if done.returncode != code:
            wrong.append(line)
            said = done.stdout.splitlines()[-SHOWN_LINES:]
            print("".join(f"    {one}\n" for one in said), f"   expected {code}", sep="")
    return wrong


def _copy_checkout(target: Path) -> None:
    """All files that git knows or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def main() -> None:
    """Run the pages that are named, or all."""
    wrong = 0
    for page in [Path(name).resolve() for name in sys.argv[1:]] or pages():
        print(page.relative_to(ROOT), flush=True)
        with tempfile.TemporaryDirectory(prefix="page-") as folder:
            wrong += len(run_page(page, Path(folder)))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
