"""FlashInfer-Bench: flashdsa's operations as solutions of its DSA definitions.

A solution is JSON that carries flashdsa's sources, so that nothing of ours must be installed where
it is judged: torch, and on a GPU CuTe DSL, which compiles the kernels at their first call.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

INDEXER = "dsa_topk_indexer_fp8_h64_d128_topk2048_ps64"
ATTENTION = "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64"
ATTENTION_PS1 = "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps1"
HARDWARE = ("NVIDIA H100", "NVIDIA H200", "NVIDIA B200")
"""GPUs that have kernels here. Those of B200 ran emulated only."""
NOT_CARRIED = (
    "adapters", "bench", "cli", "distributed", "integrations", "reference",
    "verify",
)  # fmt: skip
"""Rooms of flashdsa that no call needs."""
PACKAGE = "flashdsa_solutions"
"""Package of the modules beside this one, in a solution."""

_MAIN = '''"""{title} by flashdsa, whose sources lie beside this file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from {package}.{module} import {function}


def run({parameters}):
    {function}(
        {parameters}
    )
'''
_INDEXER_SOURCE = _MAIN.format(
    title="DSA top-k indexer",
    package=PACKAGE,
    module="binding",
    function="dsa_topk_indexer_launch",
    parameters="q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices",
)
_ATTENTION_SOURCE = _MAIN.format(
    title="DSA sparse attention",
    package=PACKAGE,
    module="attention",
    function="attend",
    parameters="q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale, output, lse",
)
SOURCES = {INDEXER: _INDEXER_SOURCE, ATTENTION: _ATTENTION_SOURCE, ATTENTION_PS1: _ATTENTION_SOURCE}
"""Definition -> the text of main.py; its `run` takes the inputs and then the outputs, written."""


def solution(definition: str, author: str = "flashdsa") -> dict[str, Any]:
    """The solution of a definition, as JSON.

    Args:
        definition: a key of `SOURCES`.
    """
    main = {"path": "main.py", "content": SOURCES[definition]}
    return {
        "name": f"flashdsa_{definition}",
        "definition": definition,
        "author": author,
        "spec": {
            "language": "python",
            "target_hardware": list(HARDWARE),
            "entry_point": "main.py::run",
            "dependencies": ["torch", "nvidia-cutlass-dsl"],
            "destination_passing_style": True,
        },
        "sources": [main, *({"path": at, "content": text} for at, text in carried().items())],
        "description": "flashdsa with its sources; CuTe DSL compiles the kernels.",
    }


@cache
def carried() -> dict[str, str]:
    """Path in a solution -> text, of flashdsa's modules that calls need, and of `PACKAGE`."""
    found = find_spec("flashdsa")
    assert found is not None and found.submodule_search_locations
    library, here = Path(found.submodule_search_locations[0]), Path(__file__).parent
    files = {
        f"flashdsa/{path.relative_to(library).as_posix()}": path
        for path in sorted(library.rglob("*.py"))
        if path.relative_to(library).parts[0] not in NOT_CARRIED
    }
    files |= {f"{PACKAGE}/{name}.py": here / f"{name}.py" for name in ("binding", "attention")}
    init = {f"{PACKAGE}/__init__.py": '"""Functions of the solutions."""\n'}
    return {at: path.read_text() for at, path in files.items()} | init
