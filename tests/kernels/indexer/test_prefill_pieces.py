"""Launches and clusters of a call over shared keys, as an H200 would have them."""

from __future__ import annotations

import pytest

from flashdsa.backends.emulated.devices import H200, SMALL
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.sm90.prefill import shared
from flashdsa.backends.sm90.prefill_pieces import Piece, pieces_of
from flashdsa.backends.sm90.prefill_scores import parts_of
from flashdsa.kernels.indexer.sm90.prefill.plan import PrefillPlan

FP8, BF16 = "float8_e4m3fn", "bfloat16"
K = 1024


def pieces(
    queries: int, keys: int, heads: int = 64, *, topk: int = 2048, ragged: bool = False,
    dtype: str = FP8, device: object = H200,
) -> tuple[Piece, ...]:  # fmt: skip
    """Launches of a call."""
    plan = shared(PrefillPlan(heads, dtype))
    return pieces_of(Emulator(device), plan, queries, keys, topk, ragged)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "sizes"),
    [
        (16, 64 * K, 64, [13]),
        (64, 20 * K, 64, [6]),
        (128, 20 * K, 64, [3]),
        (128, 128 * K, 64, [6, 8]),
        (200, 20 * K, 64, [2]),
        (256, 32 * K, 32, [3]),
        (256, 64 * K, 64, [2]),
        (128, 32 * K, 16, [6]),
        (300, 9000, 64, [3]),
        (512, 64 * K, 64, [1]),
        (529, 64 * K, 64, [1, 13]),
        (700, 32 * K, 64, [1, 5]),
        (1100, 32 * K, 64, [1, 8]),
        (8192, 8192, 64, [1]),
        (4096, 128 * K, 64, [1]),
        (1000, 2050, 64, [1]),
        (16, 2048, 64, [1]),
    ],
)
def test_clusters_fill_the_last_wave(queries: int, keys: int, heads: int, sizes: list[int]) -> None:
    assert [piece.cluster_size for piece in pieces(queries, keys, heads)] == sizes


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("dtype", [FP8, BF16])
def test_every_query_has_one_launch_and_every_launch_fits(
    heads: int, dtype: str, ragged: bool
) -> None:
    plan = shared(PrefillPlan(heads, dtype))
    for queries in (1, 3, 16, 67, 265, 300, 400, 529, 533, 1057, 1100, 1601):
        for keys in (500, 5000, 70_000, 131_072):
            end = queries
            for piece in pieces(queries, keys, heads, dtype=dtype, ragged=ragged):
                assert piece.end == end and piece.first % plan.tile_queries == 0
                assert piece.num_ctas % piece.cluster_size == 0
                assert piece.num_ctas <= H200.num_sms and piece.cluster_size <= plan.most_parts
                assert piece.num_ctas // piece.cluster_size <= H200.clusters[piece.cluster_size]
                end = piece.first
            assert end == 0


def test_ranges_of_the_device_take_clusters_if_all_tiles_of_a_launch_have_one() -> None:
    assert pieces(16, 64 * K, ragged=True) == (Piece(0, 16, 52, 13),)
    assert pieces(300, 64 * K, ragged=True) == (Piece(0, 300, 132, 1),)
    assert pieces(529, 64 * K, ragged=True) == (Piece(4, 529, 132, 1), Piece(0, 4, 13, 13))
    assert pieces(700, 32 * K, ragged=True) == (Piece(172, 700, 132, 1), Piece(0, 172, 86, 2))
    assert pieces(16, 2048, ragged=True) == (Piece(0, 16, 132, 1),)


@pytest.mark.parametrize(
    ("tiles", "key_tiles", "parts"),
    [(1, 1000, 132), (1, 3, 3), (33, 1000, 4), (66, 1000, 2), (132, 1000, 1), (5000, 1000, 1)],
)
def test_scores_alone_are_divided_evenly(tiles: int, key_tiles: int, parts: int) -> None:
    assert parts_of(tiles, key_tiles, H200.num_sms) == parts


def test_parts_of_a_tile_fit_its_numbers() -> None:
    parts = parts_of(1, 2**25, H200.num_sms)
    assert parts > 1 and 2**25 * (parts + 1) <= 2**31


def test_devices_and_settings_limit_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pieces(4, 64 * K, device=SMALL) == (Piece(0, 4, 2, 2),)
    monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", "4")
    assert pieces(16, 64 * K) == (Piece(0, 16, 16, 4),)
    monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", "1")
    assert pieces(16, 64 * K) == (Piece(0, 16, 132, 1),)
    monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", "16")
    assert pieces(16, 64 * K) == (Piece(0, 16, 64, 16),)
    (one,) = pieces(16, 64 * K, 32, dtype=BF16)
    assert one.cluster_size == 8
