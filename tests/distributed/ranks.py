"""Child processes that talk by gloo or NCCL: one pair runs many checks, as start-up is slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240


def run_ranks(
    folder: Path,
    num_ranks: int,
    checks: list[Callable[..., None]],
    timeout: float = 60,
    backend: str = "gloo",
) -> list[dict[str, str]]:
    """Run `checks` one after another on every rank; of each rank what went wrong, by check.

    A rank stops at its first failure, as the others may wait for it: their collectives end after
    `timeout` seconds. A rank that ends without a report has the failure "process".
    """
    names = [f"{check.__module__}:{check.__name__}" for check in checks]
    environment = os.environ | {
        "NCCL_NVLS_ENABLE": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.distributed.ranks"),
                *(str(folder), str(rank), str(num_ranks), str(timeout), backend, *names),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    found = []
    for rank, process in enumerate(started):
        try:
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output = f"still running after {LIMIT_SECONDS} s\n{output}"
        report = folder / f"{rank}.json"
        if report.exists():
            found.append(json.loads(report.read_text()))
        else:
            found.append({"process": f"exit code {process.returncode}\n{output[-3000:]}"})
    return found


def _work(
    folder: Path, rank: int, num_ranks: int, timeout: float, backend: str, names: list[str]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout),
    )
    failures: dict[str, str] = {}
    for name in names:
        module, _, function = name.partition(":")
        try:
            getattr(import_module(module), function)()
        except Exception:
            failures[function] = traceback.format_exc()
            break
    (folder / f"{rank}.json").write_text(json.dumps(failures))
    # A rank that failed must not wait for the others at exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _work(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        float(sys.argv[4]),
        sys.argv[5],
        sys.argv[6:],
    )
