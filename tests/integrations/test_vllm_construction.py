"""vLLM itself takes the backends: its configuration, model and builders, without a GPU.

FLASHDSA_VLLM is a folder with what `python -m workbench engines vllm --pack` packs, unpacked, and
with flashdsa's entry point; FLASHDSA_VLLM_PYTHON is a Python 3.12 with torch 2.11 for CUDA,
transformers 5.17 and NumPy below 2.4, which Triton's interpreter needs.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flashdsa.integrations.vllm import INDEXER_NAME, NAME

VLLM, PYTHON = os.environ.get("FLASHDSA_VLLM"), os.environ.get("FLASHDSA_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        VLLM is None or PYTHON is None, reason="needs FLASHDSA_VLLM and FLASHDSA_VLLM_PYTHON"
    ),
]
ROOT = Path(__file__).parents[2]
THEIRS = "FLASHMLA_SPARSE"
RUNS = (
    NAME, THEIRS, INDEXER_NAME, f"{INDEXER_NAME}:fp8_ds_mla", f"{INDEXER_NAME}:auto:1",
    f"{INDEXER_NAME}:auto:2", f"{INDEXER_NAME}:fp8_ds_mla:3", f"{NAME}:fp8", "v4",
)  # fmt: skip
MAKE = """
import sys
from pathlib import Path
from workbench.engines.checkpoint import make
make(Path(sys.argv[1]), index_topk=512)
"""


def run(*words: str) -> str:
    """Output of that Python, with vLLM, the sources and the tests on its path."""
    path = os.pathsep.join([str(VLLM), str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", *words], env=os.environ | {"PYTHONPATH": path}, cwd=ROOT,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The answers of all runs: one process, as importing vLLM takes long."""
    folder = str(tmp_path_factory.mktemp("model"))
    run("-c", MAKE, folder)
    shown = run("-m", "tests.integrations.vllm_on_cpu", folder, *RUNS)
    lines = [line for line in shown.splitlines() if line.startswith("{")]
    return {name: json.loads(line) for name, line in zip(RUNS, lines, strict=True)}


@pytest.mark.parametrize("name", [NAME, INDEXER_NAME])
def test_vllm_captures_the_same_graphs_as_with_its_own_backend(found: Any, name: str) -> None:
    ours, theirs = found[name], found[THEIRS]
    assert ours["support"] == theirs["support"] == "UNIFORM_BATCH"
    assert ours["graphs"] == theirs["graphs"] == "FULL_AND_PIECEWISE"
    assert ours["page_bytes"] == theirs["page_bytes"]
    assert ours["model"] == theirs["model"] == "DeepseekV32ForCausalLM"
    kind = "FlashDsaMLASparseImpl" if name == NAME else "FlashDsaMLASparseIndexerImpl"
    assert ours["layers"] == [kind, kind] and theirs["layers"] == ["FlashMLASparseImpl"] * 2


@pytest.mark.parametrize("name", [one for one in RUNS if one.startswith(INDEXER_NAME)])
def test_a_layer_answers_as_the_formulas_in_vllms_own_batches(found: Any, name: str) -> None:
    """Decodes and a prompt, the drafts of a verification, both caches: indexer and attention."""
    assert found[name]["error"] < 8e-3


def test_the_log_says_what_serves_and_memory_is_reserved(found: Any) -> None:
    """q of a step's tokens and 128 heads; of packed rows those of the longest prompts, too."""
    for name, rows in ((NAME, 0), (f"{INDEXER_NAME}:fp8_ds_mla", 2**16)):
        (line,) = found[name]["lines"]
        assert "sparse_mla_fwd by cpu" in line and "vLLM's: " in line
        own = (found[name]["most_tokens"] * 128 + rows) * 576 * 2
        assert found[name]["reserved"] >= own
    assert found[NAME]["reserved"] == found[THEIRS]["reserved"]
    assert found[THEIRS]["lines"] == []


def test_a_process_that_a_server_spawns_knows_the_backend(found: Any) -> None:
    assert found[INDEXER_NAME]["spawned"] == INDEXER_NAME


def test_vllm_says_which_cache_the_backend_takes(found: Any) -> None:
    assert "takes --kv-cache-dtype fp8_ds_mla, not fp8" in found[f"{NAME}:fp8"]["refused"]


def test_the_functions_of_v4_and_v41_are_replaced(found: Any) -> None:
    assert found["v4"]["v4"] == ["flashdsa.integrations.vllm.v4"] * 4
