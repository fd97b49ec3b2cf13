"""The Hopper indexer's compiled kernel on ptxemu: the CPU backend's ids, bit for bit, no findings.

Scores are exact in any order of additions (see exact_inputs.py), so the ids must be equal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.ops import indexer as indexer_ops
from flashdsa.verify.emulated_indexer import EmulatedLaunch, emulate_indexer
from tests.kernels.indexer.exact_inputs import KEY_BYTES, PAGE_BYTES, Inputs, make_inputs

MODEL = IndexerPlan()
SORTED = IndexerPlan(sorted=True)
SMALL = IndexerPlan(num_heads=16, topk=512)
MIDDLE = IndexerPlan(num_heads=32, topk=1024, sorted=True)
EDGES = [0, 1, 63, 64, 65, 2047, 2048, 2049]

# What the check says of the right kernel, by the file of the first access.
KNOWN_WARNINGS = {
    # The page's scales and the row's weights are read by ordinary loads before TMA refills them.
    # The mbarrier between the two orders them; the fence that the memory model asks for besides is
    # in no kernel of CUTLASS either.
    ("missing-proxy-fence-after-read", "score.py"),
    # Loads of neighbouring words as one vector, and of candidates behind the last one: nothing is
    # made of what nobody has written.
    ("uninitialised-read", "merge.py"),
    ("uninitialised-read", "rank.py"),
    ("uninitialised-read", "select.py"),
}


# A bad page is not loaded, its stage is multiplied as it is, and no score of it is kept.
OF_BAD_PAGES = {("uninitialised-async-read", "score.py"), ("uninitialised-read", "score.py")}


def assert_as_the_cpu(
    plan: IndexerPlan,
    inputs: Inputs,
    num_ctas: int = 4,
    seed: int = 0,
    warnings: Iterable[tuple[str, str]] = (),
) -> EmulatedLaunch:
    """The kernel's ids equal the CPU backend's, whose check of values is off; nothing is found."""
    expected, got = inputs.output(plan.topk), inputs.output(plan.topk)
    indexer_ops.dsa_topk_indexer(*inputs, expected, plan.sorted, False, "cpu")
    launch = emulate_indexer(plan, *inputs, got, num_ctas=num_ctas, seed=seed)
    assert torch.equal(got, expected)
    found = {(f.code, Path(f.first.source_file or "").name) for f in launch.findings}
    assert found <= KNOWN_WARNINGS | set(warnings)
    assert not launch.arrivals.any(), "the counters of the next launch are not 0"
    return launch


def test_lengths_around_a_page_and_topk() -> None:
    assert_as_the_cpu(MODEL, make_inputs(EDGES))


def test_lengths_around_a_page_and_topk_sorted() -> None:
    assert_as_the_cpu(SORTED, make_inputs([0, 1, 65, 2049]))


@pytest.mark.parametrize("plan", [SMALL, MIDDLE], ids=["16 heads, 512", "32 heads, 1024, sorted"])
def test_other_sizes_with_nan_keys(plan: IndexerPlan) -> None:
    k = plan.topk
    inputs = make_inputs([k - 1, k + 1, 0, 1300], num_heads=plan.num_heads, values="nan")
    assert_as_the_cpu(plan, inputs)


@pytest.mark.parametrize("values", ["equal", "two"])
def test_plateaus_end_at_the_smallest_positions(values: str) -> None:
    assert_as_the_cpu(MODEL, make_inputs([2500, 2100], values=values), num_ctas=3)


def test_a_long_segment_is_compacted() -> None:
    """More tokens than the list holds, on one CTA."""
    assert MODEL.list_capacity < 9500
    assert_as_the_cpu(MODEL, make_inputs([9500]), num_ctas=1)


@pytest.mark.parametrize("values", ["ascending", "descending"])
def test_a_row_whose_best_lie_with_one_of_its_ctas(values: str) -> None:
    """The first entries that each CTA publishes do not hold the best: the rest must be read."""
    assert_as_the_cpu(MODEL, make_inputs([9500], values=values))


def test_ctas_that_share_rows_end_in_any_order() -> None:
    inputs = make_inputs([900, 3000, 600, 700], num_heads=16, values="two")
    for seed in range(3):
        assert_as_the_cpu(SMALL, inputs, num_ctas=5, seed=seed)


def test_bad_lengths_and_page_ids_are_clamped_and_never_emitted() -> None:
    """And nothing outside the tensors is touched: the emulator knows their bounds."""
    inputs = make_inputs([700, 700, 700, 700, 300, 2000], num_heads=16)
    num_pages = inputs.k_index_cache_fp8.shape[0]
    inputs.block_table[0, 1], inputs.block_table[1, 10] = -1, num_pages
    inputs.block_table[2, :], inputs.block_table[3, 0] = 2**31 - 1, -(2**31)
    inputs.block_table[4, 0] = num_pages + 7
    inputs.seq_lens[3], inputs.seq_lens[5] = -5, 2**31 - 1
    assert_as_the_cpu(SMALL, inputs, warnings=OF_BAD_PAGES)


def test_repeated_pages_and_an_int8_cache() -> None:
    inputs = make_inputs([700, 900], num_heads=16)
    inputs.block_table[0, :11], inputs.block_table[1, 3:9] = inputs.block_table[0, 2], 1
    inputs = inputs._replace(k_index_cache_fp8=inputs.k_index_cache_fp8.view(torch.int8))
    assert_as_the_cpu(SMALL, inputs)


def test_the_public_operation_runs_it_on_cpu_tensors() -> None:
    inputs = make_inputs([600, 0, 64, 513], num_heads=16)
    expected, got = inputs.output(512), inputs.output(512)
    flashdsa.dsa_topk_indexer(*inputs, expected, backend="cpu")
    flashdsa.dsa_topk_indexer(*inputs, got, backend="emulate-sm90")
    assert torch.equal(got, expected)
    nothing = Inputs(*(x if x.dim() == 4 else x[:0] for x in inputs))
    flashdsa.dsa_topk_indexer(*nothing, got[:0], backend="emulate-sm90")


def test_the_launch_is_what_the_plan_says() -> None:
    launch = assert_as_the_cpu(SMALL, make_inputs([600], num_heads=16), num_ctas=1)
    setup = launch.setup
    assert setup.smem == SMALL.smem.total
    assert (setup.grid[0], setup.block[0]) == (1, SMALL.threads)
    ptx = setup.module.text
    assert ptx is not None
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    initialised = re.findall(r"mbarrier\.init\.shared\.b64\s+\[[^]]+\],\s*(%?\w+);", ptx)
    counts = Counter(int(constants.get(count, count)) for count in initialised)
    wanted: Counter[int] = Counter()
    for barrier in SMALL.barriers:
        wanted[barrier.arrivals] += barrier.stages
    assert counts == wanted


def test_a_missing_arrival_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's counts are the kernel's: one too many, and the CTA waits for ever."""
    from flashdsa.plan import Barrier

    monkeypatch.setattr(
        Barrier, "arrivals", property(lambda self: 2 if self.name == "segment_full" else 1)
    )
    plan = replace(SMALL, max_compared=16)  # not one that is compiled already
    inputs = make_inputs([600], num_heads=16)
    with pytest.raises(Exception, match=r"(?i)deadlock"):
        emulate_indexer(plan, *inputs, inputs.output(512), num_ctas=1)


def test_rows_of_the_table_may_lie_apart() -> None:
    inputs = make_inputs([3000, 100, 2100])
    wide = torch.full((3, inputs.block_table.shape[1] + 5), -7, dtype=torch.int32)
    wide[:, : inputs.block_table.shape[1]] = inputs.block_table
    table = wide[:, : inputs.block_table.shape[1]]
    assert not table.is_contiguous()
    assert_as_the_cpu(MODEL, inputs._replace(block_table=table))


def test_a_plateau_that_holds_the_first_token_ends_where_it_must() -> None:
    """The cut-off is token 0, the last place of the last step: its end is 2**32 - 1."""
    length, low = 3000, 953
    inputs = make_inputs([length], values="equal")
    inputs.q_index_fp8.copy_(torch.ones(inputs.q_index_fp8.shape))
    inputs.weights.fill_(1)
    pages = inputs.k_index_cache_fp8.view(-1, PAGE_BYTES)
    pages[:, :KEY_BYTES] = torch.ones(KEY_BYTES).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.ones(inputs.block_table.shape[1] * 64)
    scales[: low - 1] = 0.5
    scales[length - 2] = 0.5  # an even distance from token 0
    table = inputs.block_table[0].long()
    pages[table, KEY_BYTES:] = scales.view(len(table), 64).view(torch.uint8)
    assert int((scales[:length] == 1).sum()) == MODEL.topk - 1
    assert_as_the_cpu(MODEL, inputs, num_ctas=1)
