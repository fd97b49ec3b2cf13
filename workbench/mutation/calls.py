"""Calls of the library whose kernels' synchronisation workbench/mutation/kernels.py breaks.

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
    from torch import Tensor

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
        self.drop_keys(x.indices)
        O, lse = forward_results(x)
        # Else lists with rows out of order are not taken, unless there are hundreds.
        taken = patch.object(choice, "UNORDERED_GROUPS", 0)
        with patch.object(mla_bwd_spool, "MOST_BUFFERS", 1), taken:
            flashdsa.mla_bwd(
                x.q, x.kv, x.do, lse, O, x.indices, topk_length=x.topk_length,
                deterministic=self.ordered, backend=HOPPER,
            )  # fmt: skip

    def drop_keys(self, indices: Tensor) -> None:
        """Change the keys that the queries name: none are."""


@dataclass(frozen=True)
class BackwardWithGap(Backward):
    """A `Backward` whose second group of queries names the first and the last `named` keys only."""

    named: int = 64

    def drop_keys(self, indices: Tensor) -> None:
        """See above: groups have two queries, and all queries name the same keys."""
        import torch

        keys = indices[2][indices[2] >= 0].unique()
        dropped = torch.isin(indices[2:4], keys[self.named : -self.named])
        indices[2:4].masked_fill_(dropped, -1)


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
