"""vLLM with several backends and settings beside transformers: processes, and their verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashdsa.errors import ArgumentValueError

CASES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 2048},
    "drafts": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    "prefix": {"enable_prefix_caching": True},
    "fp8": {"kv_cache_dtype": "fp8_ds_mla"},
}
"""Arguments of LLM that make a case; "eager+fp8" has both. "chunked" has batches of prompts and
decodes."""
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16384,
    "block_size": 64,
    "gpu_memory_utilization": 0.3,
    "enable_prefix_caching": False,
}
BACKENDS = ("FLASHDSA_MLA_SPARSE", "FLASHDSA_MLA_SPARSE_INDEXER", "FLASHMLA_SPARSE")
COARSER = 16
"""e4m3 has four bits less than bf16."""
SLACK = 2
"""Two runs may each be off by bf16's error, in opposite directions."""
LIMIT_SECONDS = 300
"""A process that runs longer hangs."""
Run = Callable[[list[str]], str]
Row = dict[str, Any]


def arguments_of(case: str) -> dict[str, Any]:
    """LLM's arguments of a case.

    Raises:
        ArgumentValueError: a name that there is not.
    """
    arguments = dict(COMMON)
    for name in case.split("+"):
        if name not in CASES:
            raise ArgumentValueError(f"--case: expected {', '.join(CASES)}; got {name!r}")
        arguments |= CASES[name]
    return arguments


def in_a_process(words: list[str], path: str = "") -> str:
    """Run `vllm_process` with these words and a folder on its path; the end of its output if it
    failed or hung."""
    folders = [one for one in (path, *sys.path, os.environ.get("PYTHONPATH", "")) if one]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "workbench.engines.vllm_process", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\nstill running after {LIMIT_SECONDS} s"
    return "" if process.returncode == 0 else output[-6000:] or f"exit {process.returncode}"


def measure(
    backends: tuple[str, ...],
    cases: tuple[str, ...],
    folder: Path,
    run: Run = in_a_process,
    on_row: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Run each backend in each case, in `folder`, where a checkpoint and eager's answers stay.

    Args:
        on_row: told each row as soon as it is there.

    Returns:
        eager: its tokens, gaps and error. rows: one a run, with its verdicts or its failure.

    Raises:
        RuntimeError: the checkpoint or transformers' model did not run.
    """
    asked = [(case, backend, arguments_of(case)) for case in cases for backend in backends]
    folder.mkdir(parents=True, exist_ok=True)
    model, answers = folder / "model", folder / "eager.json"
    for path, words in (
        (model / "config.json", ["make", str(model)]),
        (answers, ["eager", str(model), str(answers)]),
    ):
        if not path.exists() and (failure := run(words)):
            raise RuntimeError(f"{words[0]}: {failure}")
    expected = json.loads(answers.read_text())
    rows = []
    for case, backend, arguments in asked:
        out = folder / f"{case}-{backend}.json"
        out.unlink(missing_ok=True)
        failure = run(["vllm", str(model), str(out), backend, json.dumps(arguments)])
        row: Row = {"case": case, "backend": backend}
        if failure:
            row["failure"] = failure
        else:
            row |= json.loads(out.read_text())
            coarser = COARSER if "kv_cache_dtype" in arguments else 1
            row["limit"] = limit = SLACK * expected["error"] * coarser
            prompts = zip(expected["tokens"], expected["gaps"], row["tokens"], strict=True)
            row["prompts"] = [judge(want, gaps, tokens, limit) for want, gaps, tokens in prompts]
        rows.append(row)
        on_row(row)
    return {"eager": expected, "rows": rows}


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
