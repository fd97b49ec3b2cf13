"""Calls of the library whose kernels' synchronisation tools/mutate_kernels.py breaks.

Each runs on ptxemu in the place of a GPU with few streaming multiprocessors, so that every CTA has
several work items.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol
from unittest.mock import patch

if TYPE_CHECKING:
    from flashdsa.backends.emulated.devices import Device
    from ptxemu.launch_setup import LaunchSetup

KEYS = 90
HOPPER, BLACKWELL = "emulate-sm90", "emulate-sm100"


class Call(Protocol):
    """Launches kernels on ptxemu.

    Attributes:
        sms: streaming multiprocessors of the device.
    """

    @property
    def sms(self) -> int:
        """See above."""

    def __call__(self) -> None:
        """Make the call, in an `emulation`."""


class _RecordedError(Exception):
    """Ends a call whose kernels have been recorded."""


def record(call: Call, kernels: Mapping[str, Path]) -> None:
    """Write the call's first launch of each kernel (whose name begins so) to its file.

    Raises:
        LookupError: it launches none of that name.
    """
    from flashdsa.backends.emulated.runner import emulation
    from ptxemu.cli.kernel_names import file_name
    from ptxemu.saved_launch import save_launch

    left = dict(kernels)

    def on_launch(setup: LaunchSetup) -> None:
        for entry in left:
            if file_name(setup.kernel).startswith(entry):
                save_launch(setup, left.pop(entry))
                break
        if not left:
            raise _RecordedError

    try:
        with emulation(device_of(call.sms), on_finding="collect", on_launch=on_launch):
            call()
    except _RecordedError:
        return
    raise LookupError(f"{call}: no kernel is named {', '.join(left)}")


def device_of(sms: int) -> Device:
    """One of so many multiprocessors, which clusters divide."""
    from flashdsa.backends.emulated.devices import Device

    return Device(sms, MappingProxyType({size: sms // size for size in range(1, sms + 1)}))


@dataclass(frozen=True)
class Backward:
    """`mla_bwd` on Hopper.

    Attributes:
        alike: queries name the same keys, so that the large groups with a spool are taken.
        ordered: the deterministic form; its groups are one chain. shorter: the second half of the
            queries names so many keys fewer. repeated: so many slots of each query name its first
            key again.
    """

    num_heads: int = 128
    queries: int = 3
    topk: int = 100
    alike: bool = False
    ordered: bool = False
    shorter: int = 0
    repeated: int = 0
    sms: int = 1
    keys: int = 260

    def __call__(self) -> None:
        """Launch delta, lists, scores, dQ and dKV."""
        import flashdsa
        from flashdsa.backends.sm90 import mla_bwd_spool
        from flashdsa.kernels.sparse_mla.sm90 import choice
        from flashdsa.verify.cases import SparseMlaCase, make_sparse_mla_inputs
        from flashdsa.verify.judge_sparse_mla import forward_results

        case = SparseMlaCase(
            "backward", self.queries, self.keys, self.num_heads, self.topk, invalid=True,
            duplicates=self.ordered and not self.alike, topk_length=not self.alike,
        )  # fmt: skip
        x = make_sparse_mla_inputs(case, 0, "cpu")
        if self.alike:
            x.indices.copy_(x.indices[:1].expand_as(x.indices).clone())
        if self.shorter:
            x.indices[self.queries // 2 :, -self.shorter :] = -1
        x.indices[:, 1 : 1 + self.repeated] = x.indices[:, :1].clone()
        O, lse = forward_results(x)
        # Else lists with rows out of order are not taken, unless there are hundreds.
        taken = patch.object(choice, "UNORDERED_GROUPS", 0)
        with patch.object(mla_bwd_spool, "MOST_BUFFERS", 1), taken:
            flashdsa.mla_bwd(
                x.q, x.kv, x.do, lse, O, x.indices, topk_length=x.topk_length,
                deterministic=self.ordered, backend=HOPPER,
            )  # fmt: skip


@dataclass(frozen=True)
class Decode:
    """`sparse_mla_fwd` of few queries on Hopper.

    Attributes:
        packed: as `SparseMlaCase` has it. sms: decide how many CTAs share a query. growing: logits
            grow from tile to tile, so that every tile scales O.
    """

    packed: str = ""
    num_heads: int = 20
    queries: int = 1
    topk: int = 400
    sms: int = 1
    growing: bool = False

    def __call__(self) -> None:
        """Launch it."""
        import torch

        import flashdsa
        from flashdsa.verify.cases import SparseMlaCase, make_sparse_mla_inputs

        if self.growing:
            draw = torch.Generator().manual_seed(0)
            kv = torch.randn(self.topk, 576, generator=draw)
            kv *= 2.0 ** (torch.arange(self.topk)[:, None] // 64)
            q = torch.randn(self.queries, self.num_heads, 576, generator=draw).bfloat16()
            rows = flashdsa.quantize_kv(kv, scale=self.packed) if self.packed else kv.bfloat16()
            indices = torch.arange(self.topk, dtype=torch.int32).repeat(self.queries, 1)
            flashdsa.sparse_mla_fwd(q, rows, indices, backend=HOPPER)
            return
        case = SparseMlaCase(
            "decode", self.queries, KEYS, self.num_heads, self.topk, packed=self.packed,
            invalid=True, duplicates=True, logit_scale=20.0, rounded_dots=True,
        )  # fmt: skip
        x = make_sparse_mla_inputs(case, 0, "cpu")
        flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, backend=HOPPER)


@dataclass(frozen=True)
class Prefill:
    """`dsa_topk_prefill` on Hopper: `queries` in a causal row of `keys`.

    Attributes:
        plateaus: most keys are equal. wide: the first 128 keys' scores are far from each other, so
            that all others fall into a few bins of the window.

    Of a query 1,024 keys are ranked at a time, and 350 scores of earlier ones are kept, so that
    short rows have several segments and fill the log.
    """

    queries: int = 9
    keys: int = 700
    topk: int = 300
    num_heads: int = 64
    dtype: str = "float8_e4m3fn"
    plateaus: bool = False
    wide: bool = False
    sms: int = 1

    def __call__(self) -> None:
        """Launch it."""
        from dataclasses import replace

        import torch

        from flashdsa.backends.emulated.runner import sm90
        from flashdsa.backends.sm90.prefill import launch, plan_of
        from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK
        from flashdsa.operands import TopkPrefillOperands
        from flashdsa.verify.prefill_cases import PrefillCase, causal, make_prefill_inputs

        case = PrefillCase(
            "prefill", causal(self.queries, self.keys), self.topk, self.num_heads,
            getattr(torch, self.dtype), plateaus=self.plateaus,
        )  # fmt: skip
        x = make_prefill_inputs(case, 0)
        if self.wide:
            (x.k_index if x.k_scale is None else x.k_scale)[:128] *= 4096
        operands = TopkPrefillOperands(
            x.q_index, x.k_index, x.weights, x.ends, x.output_buffer(), x.starts, x.k_scale
        )
        plan = plan_of(operands.inputs)
        plan = replace(plan, segment_keys=CHUNK, log_keys=350)
        launch(sm90(torch.device("cpu")), plan, operands)


@dataclass(frozen=True)
class HeadSums:
    """`attention_target`, or with `scores` `indexer_scores`, on Hopper."""

    num_heads: int = 20
    queries: int = 3
    topk: int = 330
    scores: bool = False
    sms: int = 1

    def __call__(self) -> None:
        """Launch it."""
        import flashdsa
        from flashdsa.verify.cases import (
            IndexerTrainingCase,
            SparseMlaCase,
            make_indexer_training_inputs,
        )
        from flashdsa.verify.judge_sparse_mla import forward_results

        heads = 8 if self.scores else self.num_heads
        case = SparseMlaCase(
            "sums", self.queries, KEYS, heads, self.topk, invalid=True, topk_length=True
        )
        index_heads = self.num_heads if self.scores else 16
        x = make_indexer_training_inputs(IndexerTrainingCase(case, index_heads=index_heads), 0)
        y = x.attention
        if self.scores:
            flashdsa.indexer_scores(*x.operands, topk_length=y.topk_length, backend=HOPPER)
        else:
            _, lse = forward_results(y)
            flashdsa.attention_target(
                y.q, y.kv, lse, x.indices, topk_length=y.topk_length, backend=HOPPER
            )


@dataclass(frozen=True)
class IndexBackward:
    """`indexer_bwd` on Hopper.

    Attributes:
        alike: queries name the same keys, so that the larger groups are chosen.
        ordered: the deterministic form. repeated: slots name few keys, many times.
    """

    num_heads: int = 64
    queries: int = 5
    topk: int = 100
    alike: bool = False
    ordered: bool = False
    repeated: bool = False
    sms: int = 1
    keys: int = 260

    def __call__(self) -> None:
        """Launch lists, gradients and, in order, their sum."""
        import flashdsa
        from flashdsa.verify.cases import (
            IndexerTrainingCase,
            SparseMlaCase,
            make_indexer_training_inputs,
        )

        case = SparseMlaCase(
            "index", self.queries, self.keys, 8, self.topk, invalid=True, duplicates=self.repeated
        )
        x = make_indexer_training_inputs(IndexerTrainingCase(case, index_heads=self.num_heads), 0)
        if self.alike:
            x.indices.copy_(x.indices[:1].expand_as(x.indices).clone())
        flashdsa.indexer_bwd(*x.operands, x.grad_scores, deterministic=self.ordered, backend=HOPPER)


@dataclass(frozen=True)
class FusedIndexer:
    """`dsa_topk_indexer` on Hopper with 16 heads and topk 512.

    Lists are so small that short rows compact them, and selecting counts for so little that rows of
    this length are split.

    Attributes:
        lengths: of the rows. clusters: how many, CTAs of each. values: as `make_inputs` has them.
        rows_of_one: as many more rows of a token. bad_page: one of the first row is none of the
            cache.
    """

    lengths: tuple[int, ...]
    clusters: tuple[int, int] = (1, 1)
    values: str = "random"
    rows_of_one: int = 0
    bad_page: bool = False
    sms: int = 1

    def __call__(self) -> None:
        """Launch it."""
        import torch

        from flashdsa.backends.emulated.runner import sm90
        from flashdsa.kernels.catalog import INDEXER
        from flashdsa.kernels.indexer.sizes import ROW_COUNTERS
        from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
        from tests.kernels.indexer.exact_inputs import make_inputs

        plan = IndexerPlan(
            num_heads=16, topk=512, splits=True, scheduled=True, list_capacity=2048,
            first_fill_pages=10, fill_step_pages=2, select_pages=1, merge_pages=3,
            settling_ctas=2, settling_pages=15, count_polls=100_000,
        )  # fmt: skip
        lengths = [*self.lengths, *(1 for _ in range(self.rows_of_one))]
        q, cache, *others = make_inputs(lengths, num_heads=16, values=self.values)
        if self.bad_page:
            others[-1][0, 2] = -1
        runner = sm90(torch.device("cpu"))
        ctas = self.clusters[0] * self.clusters[1]
        counters = torch.zeros(max(len(lengths), ctas * ROW_COUNTERS), dtype=torch.int32)
        slots = runner.empty(ctas, plan.slot_words, dtype=torch.int32)
        ids = runner.empty(len(lengths), plan.topk, dtype=torch.int32)
        function = runner.function(INDEXER, plan)
        with runner.launching():
            how = counters, slots, *self.clusters, 1
            function(q, cache.view(torch.uint8), *others, ids, *how)


@dataclass(frozen=True)
class GroupedBackward:
    """`mla_bwd` on Blackwell, of groups of queries with fewer than 128 heads."""

    num_heads: int = 64
    queries: int = 3
    topk: int = 40
    sms: int = 4

    def __call__(self) -> None:
        """Launch unions, delta, and the gradients."""
        import flashdsa
        from flashdsa.verify.cases import SparseMlaCase, make_sparse_mla_inputs
        from flashdsa.verify.judge_sparse_mla import forward_results

        case = SparseMlaCase(
            "groups", self.queries, KEYS, self.num_heads, self.topk, duplicates=True, invalid=True
        )
        x = make_sparse_mla_inputs(case, 0, "cpu")
        O, lse = forward_results(x)
        flashdsa.mla_bwd(x.q, x.kv, x.do, lse, O, x.indices, backend=BLACKWELL)


@dataclass(frozen=True)
class GroupedForward:
    """`sparse_mla_fwd` on Blackwell, of groups of queries with fewer than 128 heads."""

    num_heads: int = 64
    queries: int = 2
    topk: int = 300
    sms: int = 4

    def __call__(self) -> None:
        """Launch unions and the forward."""
        import flashdsa
        from flashdsa.verify.cases import SparseMlaCase, make_sparse_mla_inputs

        case = SparseMlaCase(
            "groups", self.queries, 448, self.num_heads, self.topk, invalid=True,
            logit_scale=20.0, rounded_dots=True,
        )  # fmt: skip
        x = make_sparse_mla_inputs(case, 0, "cpu")
        flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, backend=BLACKWELL)
