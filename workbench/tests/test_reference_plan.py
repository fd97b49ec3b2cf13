"""The reference design's numbers, computed from its regions by the code that checks our plans."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from flashdsa.plan import BudgetError
from workbench.__main__ import cli
from workbench.reference_plan import ReferencePlan, budgets


def test_the_sums_are_the_designs() -> None:
    smem = ReferencePlan(32).smem
    sizes = {region.name: region.bytes for region in smem.regions}
    union = sum(sizes[name] for name in ("kv", "kv_peer", "q_nope", "q_rope"))
    assert (union, sizes["dq"], sizes["sdKV"]) == (110_592, 73_728, 73_728)
    assert (smem.total, smem.capacity) == (194_208, 232_448)
    assert smem.offset("dq") == smem.offset("kv") == 0
    before, after, _ = budgets()
    assert (before.kilobytes, after.kilobytes) == (225.7, 189.7)
    assert (f"{before.share:.1f}", f"{after.share:.1f}") == ("99.4", "83.6")


def test_tensor_memory_is_full_and_of_64_keys_too_small() -> None:
    tmem = ReferencePlan(32).tmem
    assert tmem.allocated == 512 == tmem.column("dO") + 128
    assert tmem.column("dKV_RoPE") == tmem.column("dP") == 352
    with pytest.raises(BudgetError, match=r"dO \[480, 608\)"):
        _ = ReferencePlan(64).tmem


def test_the_command_shows_both() -> None:
    shown = CliRunner().invoke(cli, ["reference"])
    assert shown.exit_code == 0
    for text in ("194,208", "230,148", "-36.0 KB, -15.8 points", "cta_group"):
        assert text in shown.output
    assert CliRunner().invoke(cli, ["reference", "--keys", "64", "--json"]).exit_code == 0
