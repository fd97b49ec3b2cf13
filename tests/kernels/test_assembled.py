"""NVIDIA's newest assembler takes the kernels' PTX, and spills nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from flashdsa.kernels.catalog import BACKENDS, variants_of
from flashdsa.plan.kernel_spec import Variant
from flashdsa.toolchain import Assembler
from tests.support.compilations import ptx_of

ALWAYS = {
    "mla_bwd_group8", "mla_fwd_group4_drawn", "mla_decode_v4", "mla_decode_stream_k_packed",
    "mla_bwd_dkv_blocks4", "attention_target_h128",
}  # fmt: skip
"""A large one of each operation."""
LATER = (
    r"mla_bwd(_deterministic|_sink|_padded_heads)?|mla_used_slots|indexer_scores_h64"
    r"|mla_fwd(_drawn|_group8_drawn|_512_group4_drawn|_drawn_joined|_512_drawn_joined)?"
    r"|mla_bwd_(fused_512_group2_tickets|scores|scores_512|dq_blocks4|dq_512_blocks4|dkv_512_blocks4)"
    r"|mla_decode(_packed|_512|_v4.*|_v32_no_rope.*)?(_joined)?(_single_cta)?"
    r"|mla_decode_stream_k(_512|_512_joined|_v4_joined)?|mla_decode(_stream_k)?_heads16(_v32_no_rope)?"
)
"""Others, which are slow tests."""
FUNCTIONS = {"mla_bwd": 2, "mla_bwd_group8": 4, "mla_bwd_deterministic": 3}
"""How many a module has: beside the backward those of delta, the union, what mends dQ."""
VARIANTS = [
    pytest.param(variant, id=name, marks=() if name in ALWAYS else pytest.mark.slow)
    for backend in BACKENDS
    for name, variant in variants_of(backend).items()
    if name in ALWAYS or re.fullmatch(LATER, name)
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_spilled(variant: Variant, tmp_path: Path) -> None:
    """Nor does a wgmma wait for the one before, which ptxas says as a warning."""
    found = Assembler.find()
    if found is None:
        pytest.skip("needs ptxas: pip install nvidia-cuda-nvcc")
    spec, plan = variant
    source, cubin = tmp_path / "kernel.ptx", tmp_path / "cubin"
    source.write_text(ptx_of(spec, plan))
    command = [str(found.path), f"-arch={spec.arch}", "-v", str(source), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spills and set(spills) == {("0", "0")}
    assert len(spills) == FUNCTIONS.get(variant.name, len(spills))
    assert "wgmma" not in done.stderr
