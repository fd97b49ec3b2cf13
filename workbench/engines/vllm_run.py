"""vLLM with several backends and settings beside transformers: processes, and their verdicts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from flashdsa.bench.checkout import find_checkout
from flashdsa.bench.machine import describe_machine
from flashdsa.errors import ArgumentValueError

CASES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 2048},
    "drafts": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    "prefix": {"enable_prefix_caching": True},
    "fp8": {"kv_cache_dtype": "fp8_ds_mla"},
    "server": {},
    "tp2": {"tensor_parallel_size": 2},
}
"""Arguments of LLM that make a case; "eager+fp8" has both. "chunked" has batches of prompts and
decodes, "server" is `vllm serve`, "tp2" needs two GPUs."""
ALL_GPUS = -1
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16384,
    "block_size": 64,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 2**30,
    "enable_prefix_caching": False,
}
BACKENDS = ("FLASHDSA_MLA_SPARSE", "FLASHDSA_MLA_SPARSE_INDEXER", "FLASHMLA_SPARSE")
BF16_ONLY = ("FLASH_ATTN_MLA_SPARSE",)
"""vLLM's first choice on Hopper, timed beside them."""
COARSER = 4
"""e4m3 has four bits less than bf16; RoPE's columns stay bf16, and errors of 512 average out."""
SLACK = 2
"""Two runs may each be off by bf16's error, in opposite directions."""
LIMIT_SECONDS = 300
"""A process that runs longer hangs."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""The engine runs in a process of ours, without network."""
SCHEMA = "flashdsa-engine-speed/1"
PROCESS = "workbench.engines.vllm_process"
Run = Callable[[list[str], int], str]
"""Runs a process with these words on one of the GPUs, counted round, or ALL_GPUS; its failure, or
""."""
Row = dict[str, Any]


def arguments_of(
    case: str, cases: dict[str, dict[str, Any]] = CASES, common: dict[str, Any] = COMMON
) -> dict[str, Any]:
    """An engine's arguments of a case, by default those of vLLM's LLM.

    Raises:
        ArgumentValueError: a name that there is not.
    """
    arguments = dict(common)
    for name in case.split("+"):
        if name not in cases:
            raise ArgumentValueError(f"--case: expected {', '.join(cases)}; got {name!r}")
        arguments |= cases[name]
    return arguments


def in_a_process(
    words: list[str],
    gpu: int,
    path: str = "",
    log: Path | None = None,
    module: str = PROCESS,
    environment: dict[str, str] = ENVIRONMENT,
    limit: float | None = None,
) -> str:
    """Run a module with these words and a folder on its path; the end of its output if it
    failed or hung.

    Args:
        log: a file for all of its output.
        limit: seconds; None: LIMIT_SECONDS.
    """
    limit = LIMIT_SECONDS if limit is None else limit
    folders = [one for one in (path, *sys.path, os.environ.get("PYTHONPATH", "")) if one]
    seen = environment | {"PYTHONPATH": os.pathsep.join(folders)}
    if gpu != ALL_GPUS and (gpus := torch.cuda.device_count()) > 1:
        seen["CUDA_VISIBLE_DEVICES"] = str(gpu % gpus)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *words],
        env=os.environ | seen,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nstill running after {limit} s"
    if log is not None:
        log.write_text(output)
    return "" if process.returncode == 0 else output[-6000:] or f"exit {process.returncode}"


def measure(
    backends: tuple[str, ...],
    cases: tuple[str, ...],
    folder: Path,
    run: Run = in_a_process,
    on_row: Callable[[Row], None] = lambda row: None,
    jobs: int = 1,
    settings: Callable[[str], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Run each backend in each case, in `folder`, where a checkpoint and eager's answers stay.

    Args:
        on_row: told each row as soon as it is there.
        jobs: processes side by side, each on the next GPU if there are several.
        settings: a case's arguments; None: `arguments_of`.

    Returns:
        eager: its tokens, gaps and error. rows: one a run, with its verdicts or its failure.

    Raises:
        RuntimeError: the checkpoint or transformers' model did not run.
    """
    settings = settings or arguments_of
    asked = [(case, backend, settings(case)) for case in cases for backend in backends]
    folder.mkdir(parents=True, exist_ok=True)
    model, answers = folder / "model", folder / "eager.json"
    for path, words in (
        (model / "config.json", ["make", str(model)]),
        (answers, ["eager", str(model), str(answers)]),
    ):
        if not path.exists() and (failure := run(words, 0)):
            raise RuntimeError(f"{words[0]}: {failure}")
    expected = json.loads(answers.read_text())

    def one(number: int) -> Row:
        case, backend, arguments = asked[number]
        out = folder / f"{case}-{backend}.json"
        out.unlink(missing_ok=True)
        gpu = ALL_GPUS if "tensor_parallel_size" in arguments else number
        job = "server" if "server" in case.split("+") else "vllm"
        failure = run([job, str(model), str(out), backend, json.dumps(arguments)], gpu)
        row: Row = {"case": case, "backend": backend}
        if failure:
            row["failure"] = failure
        else:
            row |= json.loads(out.read_text())
            coarser = COARSER if "kv_cache_dtype" in arguments else 1
            row["limit"] = limit = SLACK * expected["error"] * coarser
            prompts = zip(expected["tokens"], expected["gaps"], row["tokens"], strict=True)
            row["prompts"] = [judge(want, gaps, tokens, limit) for want, gaps, tokens in prompts]
        on_row(row)
        return row

    with ThreadPoolExecutor(jobs) as pool:
        return {"eager": expected, "rows": list(pool.map(one, range(len(asked))))}


def judge(want: list[int], gaps: list[float], got: list[int], limit: float) -> dict[str, Any]:
    """Count equal tokens up to the first other one, whose two best must be closer than `limit`."""
    pairs = zip(want, got, strict=True)
    equal = next((i for i, (one, other) in enumerate(pairs) if one != other), len(want))
    gap = gaps[equal] if equal < len(want) else None
    return {"equal": equal, "of": len(want), "gap": gap, "right": gap is None or gap <= limit}


def findings(document: dict[str, Any]) -> list[str]:
    """A line for each run that failed, and each prompt that another token answers."""
    lines = []
    for row in document["rows"]:
        name = f"{row['case']}, {row['backend']}"
        if "failure" in row:
            lines.append(f"{name}: failed\n{row['failure']}")
        for number, one in enumerate(row.get("prompts", ())):
            if not one["right"]:
                lines.append(
                    f"{name}: prompt {number}: token {one['equal']} differs where the two best are "
                    f"{one['gap']:.3f} apart; expected at most {row['limit']:.3f}"
                )
    return lines


def measure_speed(
    backends: tuple[str, ...],
    folder: Path,
    run: Run,
    on_row: Callable[[Row], None] = lambda row: None,
    rounds: int = 2,
    **arguments: Any,
) -> dict[str, Any]:
    """Run each backend in turn, `rounds` times, every second time in the opposite order.

    Args:
        arguments: of LLM, beside those of `vllm_speed`.

    Returns:
        git, machine: where it ran. rows: one a run, its backend and what `vllm_speed.run` says.

    Raises:
        RuntimeError: a run failed, which ends the comparison.
    """
    model = folder / "speed"
    if not (model / "config.json").exists() and (failure := run(["make", str(model)], 0)):
        raise RuntimeError(f"make: {failure}")
    rows: list[Row] = []
    for number in range(rounds):
        for backend in backends[:: -1 if number % 2 else 1]:
            out = folder / f"speed-{number}-{backend}.json"
            if failure := run(["run", str(model), str(out), backend, json.dumps(arguments)], 0):
                raise RuntimeError(f"{backend}: {failure}")
            rows.append({"backend": backend, "round": number} | json.loads(out.read_text()))
            on_row(rows[-1])
    origin = find_checkout()
    return {
        "schema": SCHEMA,
        "git": origin.as_dict() if origin else None,
        "machine": describe_machine().as_dict(),
        "rows": rows,
    }


def speeds(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Tokens a second of "users x context", milliseconds to the first token of "1 x prompt", by
    kind and backend: the best of the rounds, as what else the CPU does only adds."""
    found: dict[str, dict[str, float]] = {}
    for kind in ("step", "first"):
        for name in rows[0][kind]:
            users = int(name.split()[0])
            times: dict[str, list[float]] = {}
            for row in rows:
                times.setdefault(row["backend"], []).append(row[kind][name])
            found[f"{kind} {name}"] = {
                backend: users / min(one) if kind == "step" else 1e3 * min(one)
                for backend, one in times.items()
            }
    return found


def busy_times(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Milliseconds that a cell's kernels take, by cell and backend: the least of the rounds."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        for name, kernels in row["kernels"].items():
            of_cell = found.setdefault(name, {})
            for kind, _, time in kernels:
                if kind == "all kernels":
                    of_cell[row["backend"]] = min(time, of_cell.get(row["backend"], time))
    return found
