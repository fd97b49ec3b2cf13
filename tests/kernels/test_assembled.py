"""NVIDIA's newest assembler takes the kernels' PTX, and spills nothing."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from flashdsa.kernels.catalog import BACKENDS, variants_of
from flashdsa.plan.kernel_spec import Variant
from tests.support.compilations import ptx_of
from tools.fingerprints import GPUS, complaints

pytestmark = pytest.mark.slow
"""`tools/fingerprints.py` asks the same of every variant whose instructions change."""
NAMES = (
    r"mla_bwd(_deterministic|_sink|_padded_heads|_group8|_dkv_blocks4)?|mla_used_slots"
    r"|mla_fwd(_drawn|_group8_drawn|_group4_drawn|_512_group4_drawn|_drawn_joined|_512_drawn_joined)?"
    r"|mla_bwd_(fused_512_group2_tickets|scores|scores_512|dq_blocks4|dq_512_blocks4|dkv_512_blocks4)"
    r"|mla_decode(_packed|_512|_v4.*|_v32_no_rope.*)?(_joined)?(_single_cta)?"
    r"|mla_decode_stream_k(_packed|_512|_512_joined|_v4_joined)?"
    r"|mla_decode(_stream_k)?_heads16(_v32_no_rope)?|indexer_scores_h64|attention_target_h128"
)
"""Large ones of each operation."""
FUNCTIONS = {"mla_bwd": 2, "mla_bwd_group8": 4, "mla_bwd_deterministic": 3}
"""How many a module has: beside the backward those of delta, the union, what mends dQ."""
VARIANTS = [
    pytest.param(GPUS[backend], variant, id=name)
    for backend in BACKENDS
    for name, variant in variants_of(backend).items()
    if re.fullmatch(NAMES, name)
]


@pytest.mark.parametrize(("gpus", "variant"), VARIANTS)
def test_nothing_is_spilled(gpus: tuple[str, ...], variant: Variant) -> None:
    """Nor does a wgmma wait for the one before, which ptxas says as a warning."""
    spec, plan = variant
    ptx = ptx_of(spec, plan)
    assert [text for gpu in gpus for text in complaints(ptx, gpu)] == []
    expected = FUNCTIONS.get(variant.name)
    assert expected is None or len(re.findall(r"\.entry ", ptx)) == expected
