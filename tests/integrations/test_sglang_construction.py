"""SGLang 0.5.13 itself runs a model through flashdsa's hooks, without a GPU.

FLASHDSA_SGLANG is a folder with what `python -m workbench engines sglang --pack` packs, unpacked
by `workbench.engines.pack.unpack`; FLASHDSA_SGLANG_PYTHON is a Python 3.12 with torch 2.11 for
CUDA, torchvision, transformers 5.17 and NumPy below 2.4, which Triton's interpreter needs.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from workbench.engines.pack import LIBRARIES
from workbench.engines.sglang_process import COUNTS
from workbench.engines.sglang_run import CASES, COMMON
from workbench.engines.vllm_run import COARSER, SLACK, arguments_of, judge

SGLANG, PYTHON = os.environ.get("FLASHDSA_SGLANG"), os.environ.get("FLASHDSA_SGLANG_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        SGLANG is None or PYTHON is None, reason="needs FLASHDSA_SGLANG and FLASHDSA_SGLANG_PYTHON"
    ),
]
LENGTHS, NEW = (40, 300), 4
"""Of the prompts, one longer than the checkpoint's topk, and tokens that are generated."""
ROOT = Path(__file__).parents[2]
SMALL = {"max_total_tokens": 2048, "context_length": 1024, "log_level": "error"}
MAKE = f"""
import json, sys
from pathlib import Path
from workbench.engines import checkpoint
folder = Path(sys.argv[1])
sizes = {{"first_k_dense_replace": 2, "num_attention_heads": 8, "num_key_value_heads": 8}}
checkpoint.make(folder, index_topk=128, **sizes)
print(json.dumps(checkpoint.eager(folder, {LENGTHS}, {NEW})))
"""


def run(folder: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """A process of that Python, with the sources and the tests on its path."""
    folders = [one for one in (path, str(ROOT), str(ROOT / "src")) if one]
    seen = {"PYTHONPATH": os.pathsep.join(folders), COUNTS: str(folder / "counts")}
    if path:
        seen["LD_LIBRARY_PATH"] = str(Path(path, LIBRARIES))
    return subprocess.run(
        [str(PYTHON), "-W", "ignore", *words], env=os.environ | seen, cwd=ROOT,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and transformers' answers."""
    folder = tmp_path_factory.mktemp("model")
    done = run(folder, "-c", MAKE, str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


def served(folder: Path, case: str, **more: str) -> subprocess.CompletedProcess[str]:
    """SGLang's run of a case."""
    arguments = arguments_of(case, CASES, COMMON) | SMALL | more
    words = str(folder), json.dumps(arguments), str(NEW), *map(str, LENGTHS)
    return run(folder, "-m", "tests.integrations.sglang_on_cpu", *words, path=str(SGLANG))


@pytest.mark.parametrize(
    ("case", "prefill", "methods"),
    [
        ("eager", "flashmla_sparse", {"_forward_flashmla_sparse": 8}),
        ("eager+fp8", "flashmla_kv", {"_forward_flashmla_kv": 8}),
        # Prompts of an fp8 cache as bf16 rows, gathered.
        (
            "eager+fp8", "flashmla_sparse",
            {"_forward_flashmla_sparse": 2, "_forward_flashmla_kv": 6},
        ),
    ],
)  # fmt: skip
def test_tokens_are_those_of_transformers(
    made: Any, case: str, prefill: str, methods: dict[str, int]
) -> None:
    """A batch of two prompts and three decodes, of two layers: attention and the indexer."""
    folder, eager = made
    done = served(folder, case, dsa_prefill_backend=prefill)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    limit = SLACK * eager["error"] * (COARSER if "fp8" in case else 1)
    for one in zip(eager["tokens"], eager["gaps"], found["tokens"], strict=True):
        assert judge(*one, limit)["right"], (one, limit)
    assert found["calls"] == methods | {
        "sparse_mla_fwd": 8, "dsa_topk_prefill": 2, "dsa_topk_indexer": 6, "_get_topk_ragged": 2,
        "_get_topk_paged": 6,
    }  # fmt: skip
    index, attention = found["lines"]
    assert "dsa_topk_indexer by cpu, dsa_topk_prefill by cpu; kernels:" in index
    cache = "of packed rows" if "fp8" in case else "bf16"
    assert "sparse_mla_fwd by cpu; kernels:" in attention and f"kv cache {cache};" in attention


def test_another_backend_ends_the_start(made: Any) -> None:
    done = served(made[0], "eager", dsa_decode_backend="fa3")
    assert done.returncode == 1
    assert "flashdsa: --dsa-decode-backend fa3 is not served" in done.stderr.splitlines()[-1]
