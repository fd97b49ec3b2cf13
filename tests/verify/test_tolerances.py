"""The tolerance table says what the contract says."""

import pytest
import torch

from flashdsa.verify.tolerances import SCORE_TOLERANCES, TOLERANCES, tolerance

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("operation", "output", "dtype", "norm"),
    [
        ("sparse_mla_fwd", "O", BF16, 2.5e-3),
        ("sparse_mla_fwd", "O", FP32, 1e-5),
        ("sparse_mla_fwd", "O", FP64, 1e-11),
        ("mla_bwd", "dQ", BF16, 2.5e-3),
        ("mla_bwd", "dQ", FP64, 1e-11),
        ("mla_bwd", "dKV", BF16, 2.5e-3),
        ("mla_bwd", "dKV", FP32, 1e-5),
        ("mla_bwd", "dKV:bf16", BF16, 3.5e-3),
        ("mla_bwd", "d_sink", BF16, 1e-2),
        ("sparse_mla", "kv.grad", BF16, 3.5e-3),
        ("sparse_mla", "kv.grad", FP32, 1e-5),
    ],
)
def test_norm_limits(operation, output, dtype, norm):
    assert tolerance(operation, output, dtype).norm == norm


def test_every_gradient_and_output_has_the_row_rule():
    rows = {
        key: limits.row for key, limits in TOLERANCES.items() if key[1] not in ("lse", "target")
    }
    assert set(rows.values()) == {1e-2}


def test_lse_and_score_limits():
    for dtype in (BF16, FP32):
        limits = tolerance("sparse_mla_fwd", "lse", dtype)
        assert (limits.absolute, limits.relative) == (1e-4, 4e-7)
    assert SCORE_TOLERANCES["cpu"] == 1e-5 and SCORE_TOLERANCES["sm90"] == 3e-4


def test_an_unknown_output_is_an_error_not_a_guess():
    with pytest.raises(KeyError):
        tolerance("sparse_mla_fwd", "dQ", BF16)
