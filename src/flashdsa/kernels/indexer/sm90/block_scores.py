"""The best score of each block of 8 tokens, of scores that lie in the registers of a warp.

Both scoring kernels have 8 neighbouring tokens in lanes whose numbers are equal modulo 4.
"""

from cutlass import Float32, cute

LANES_APART = (4, 8, 16)
"""Distances of the lanes that have tokens of the same block."""


def best_of_block(score: Float32) -> Float32:
    """The best number among the scores of the caller's block; NaN if there is none."""
    for apart in LANES_APART:
        score = cute.arch.fmax(score, cute.arch.shuffle_sync_bfly(score, apart))
    return score
