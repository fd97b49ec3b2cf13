"""Compiles a kernel of ours in a process of its own, which keeps its PTX and cubin.

CuTe DSL reads CUTE_DSL_KEEP, CUTE_DSL_LINEINFO and CUTE_DSL_DUMP_DIR when it is imported, hence
the process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flashdsa.errors import UnsupportedError
from flashdsa.hw import ARCHITECTURES
from flashdsa.jit.loader import compile_plan, require_compiler
from flashdsa.plan.kernel_spec import Variant

_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Kept:
    """Result of CuTe DSL for one `cute.compile`: one of possibly several in a kernel of ours."""

    ptx: str
    cubin: bytes


def compile_and_keep(kernel: Variant) -> list[Kept]:
    """Compile with line information; needs no GPU, takes seconds.

    Raises:
        UnsupportedError: CuTe DSL is not installed, or does not compile the kernel; says why.
    """
    require_compiler()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "CUTE_DSL_ARCH": ARCHITECTURES[kernel.spec.arch].target,
            "CUTE_DSL_DUMP_DIR": folder,
            "CUTE_DSL_KEEP": "ptx,cubin",
            "CUTE_DSL_LINEINFO": "1",
        }
        run = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps(kernel),
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
        if run.returncode:
            stderr = run.stderr.decode(errors="replace")
            said = [line.strip() for line in stderr.splitlines() if line.strip()]
            reason = said[-1] if said else f"exit code {run.returncode}"
            raise UnsupportedError(f"CuTe DSL does not compile {kernel.name}: {reason}")
        return [
            Kept(path.with_suffix(".ptx").read_text().rstrip("\0"), path.read_bytes())
            for path in sorted(Path(folder).rglob("*.cubin"))
        ]


if __name__ == "__main__":
    compile_plan(*pickle.load(sys.stdin.buffer))
