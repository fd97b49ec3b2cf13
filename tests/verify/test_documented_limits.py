"""docs/concepts/dsa.md, "How right", has the limits by which results are judged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from flashdsa.settings import BACKENDS
from flashdsa.verify import tolerances as t

TEXT = (Path(__file__).parents[2] / "docs/concepts/dsa.md").read_text()
NUMBER = re.compile(r"\d[\d.]*e-\d+")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def norm(operation: str, output: str, dtype: torch.dtype = BF16) -> float:
    limit = t.tolerance(operation, output, dtype).norm
    assert limit is not None
    return limit


LSE = t.tolerance("sparse_mla_fwd", "lse", BF16)
TARGET = t.tolerance("attention_target", "target", BF16)
BACKEND_SCORES = {t.SCORE_TOLERANCES[name] for name in BACKENDS if name not in ("auto", "cpu")}
LIMITS: dict[str, set[float | None]] = {
    "O, dQ, fp32 dKV from bf16 inputs": {
        norm(*of) for of in (("sparse_mla_fwd", "O"), ("mla_bwd", "dQ"), ("mla_bwd", "dKV"))
    },
    "bf16 dKV, `kv.grad`": {norm("mla_bwd", "dKV:bf16"), norm("sparse_mla", "kv.grad")},
    "d_sink": {norm("mla_bwd", "d_sink")},
    "fp32, fp64 inputs": {norm("mla_bwd", "dQ", FP32), norm("mla_bwd", "dQ", FP64)},
    "lse, each element": {LSE.absolute, LSE.relative},
    "indexer scores, each element, of the CPU": {t.SCORE_TOLERANCES["cpu"]},
    "of every other backend": {
        *BACKEND_SCORES, t.PRODUCT_TOLERANCE, t.PRODUCT_TOLERANCE_ANY_DATA
    },
    "P": {TARGET.relative},
    "I": {t.TRAINED_SCORES[BF16]},
    "KL": {t.KL_TOLERANCE[BF16]},
    "gradients of q, k, w": {norm("indexer_bwd", "dk_index", x) for x in (BF16, FP32, FP64)},
    "Every row": {t.ROW_TOLERANCE, t.ROW_TOLERANCE * t.ROW_CANCELLATION},
    "No row is too long or too short": {t.BIAS_TOLERANCE},
    "Outputs that cancel": {t.NORM_CANCELLATION},
}  # fmt: skip


def written(limit: float | None) -> str:
    """ "2.5e-3" for 0.0025."""
    assert limit is not None
    mantissa, _, exponent = f"{limit:e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


@pytest.mark.parametrize("subject", LIMITS)
def test_a_limit_of_the_document_is_the_judges(subject: str) -> None:
    _, after = TEXT.split(f"**{subject}**")
    sentence = after.split("**")[0]
    assert {written(limit) for limit in LIMITS[subject]} <= {*NUMBER.findall(sentence)}, sentence
