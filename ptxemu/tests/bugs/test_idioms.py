"""Correct programs of common idioms: right values, and nothing is found."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.bugs.test_mended_bugs import FOLDER, NUMBERS, Ints, compiled, device

from ptxemu import api
from ptxemu.cuda.memory import EmulatedMemory
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.sched.policy import Policy

__all__ = ["device"]
KINDS = ("random", "late", "slow", "eager")


def alike(x: Ints) -> list[int]:
    """What `groups` leaves of its labels: the first number alike, and their count."""
    rest = x[:32] % 3
    return [int(x[np.argmax(rest == r)] + (rest == r).sum()) for r in rest]


def rows(x: Ints, count: int, width: int = 32) -> Ints:
    return x[: count * width].reshape(count, width)


IDIOMS: dict[str, tuple[int, int, Callable[[Ints], Any]]] = {
    "warp_roles": (1, 32, lambda x: [0] + [x[:5].sum()] * 31),
    "half_publishes": (1, 64, lambda x: [*x[:16][::-1], *[0] * 16]),
    "groups": (1, 32, lambda x: [*alike(x), *x[:32][x[:32] % 2 == 1][::-1]]),
    "staged_products": (1, 32, lambda x: x[:16].repeat(2) + 2),
    "both_arms": (1, 32, lambda x: [*(2 * x[16:32]), *(3 * x[:16] + 3)]),
    "structs": (1, 32, lambda x: (x[:32] + x[32:64])[::-1] + x[:32] * (np.arange(32) % 5 > 0)),
    "pipeline": (1, 64, lambda x: rows(x, 6)[:, ::-1].sum(0)),
    "look_back": (8, 32, lambda x: x[:256].cumsum()),
    "last_block": (8, 32, lambda x: [x[:256].sum()]),
    "data_with_flags": (2, 32, lambda x: rows(x, 3).sum(0)),
    "polled_by_a_warp": (4, 32, lambda x: rows(x, 3)[:, ::-1].sum(0)),
    "one_warp_waits": (2, 64, lambda x: x[:128] + (np.tile(
        rows(x, 4)[::2, ::-1] + rows(x, 4)[1::2] + 2, 2)).reshape(-1)),
    "gathered": (4, 32, lambda x: x[:32] + x[32:64][::-1] + x[64:96] + x[96:128][::-1]),
}  # fmt: skip
"""Blocks, threads, and the first numbers of `out` by x."""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> api.Module:
    return compiled(FOLDER / "idioms.cu", tmp_path_factory.mktemp("idioms"), "sm_90a")


@pytest.mark.parametrize("seed", range(len(KINDS)))
@pytest.mark.parametrize("name", IDIOMS)
def test_a_correct_program(
    module: api.Module, device: EmulatedMemory, name: str, seed: int
) -> None:
    grid, block, expected = IDIOMS[name]
    x = device.view(device.base, 4 * NUMBERS).view(np.int32)
    x[:] = 0
    x[:512] = np.random.default_rng(seed).integers(1, 512, 512)
    want = np.asarray(expected(x.copy()))
    memory = GlobalMemory()
    device.register_in(memory)
    args = [device.base, device.base + (1 << 16)]
    how: dict[str, Any] = {"args": args, "memory": memory, "check": True}
    how["policy"] = Policy(seed=seed, asynchronous=KINDS[seed])
    if f"{name}_before" in module.kernels:
        how["earlier"] = module.launch(f"{name}_before", grid, block, **how).earlier
    how["cluster"] = grid if name == "gathered" else None
    result = module.launch(name, grid, block, **how)
    assert [f.message for f in result.findings if f.level == "error"] == []
    out = device.view(args[1], 4 * NUMBERS).view(np.int32)
    np.testing.assert_array_equal(out[: len(want)], want)
