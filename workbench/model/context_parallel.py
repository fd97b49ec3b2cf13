"""One attention layer's training step over many GPUs: kernels, collectives, and who waits.

A layer is the indexer, the forward and the backward of sparse MLA, with queries and keys spread
over P ranks (`flashdsa.distributed`). Rates are of one GPU and of links; work is counted from the
layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flashdsa.errors import ArgumentValueError
from flashdsa.problem import (
    D_QK,
    D_V,
    INDEX_HEAD_DIM,
    INDEX_TOKEN_BYTES,
    INDEX_TOPK,
    NUM_INDEX_HEADS,
    PAGE_SIZE,
)

MOST_RANKS = 8192
ENOUGH = 0.8
"""The efficiency below which more ranks do not pay."""

_FORWARD_FLOP = 2 * (D_QK + D_V)
"""Of a head and a selected key."""
_BACKWARD_FLOP = 2 * (3 * D_QK + 2 * D_V)
_INDEXER_FLOP = 2 * NUM_INDEX_HEADS * INDEX_HEAD_DIM
"""Of a query and a key that it sees."""
_KV_BYTES = 2 * D_QK
_WIRE_BYTES = {"fp32": 4 * D_QK, "bf16": 2 * D_QK}


@dataclass(frozen=True)
class Rates:
    """What a GPU computes and what links carry; every field may come from a JSON file.

    Attributes:
        forward_tflops, backward_tflops, indexer_tflops: of the kernels.
        link_gb: GB/s that a rank receives within a node. pair_link_gb: the same with 2 ranks.
        nic_gb: GB/s that a node receives, per GPU in it.
        latency_us: of a collective, whatever its size; hop_us: besides, for each doubling of ranks
            in a node; nic_hop_us: for each doubling of nodes.
        gpus_per_node: that share the fast links.
        noise: relative standard deviation of a rank's time; the slowest of P is waited for.
    """

    forward_tflops: float = 600
    backward_tflops: float = 500
    indexer_tflops: float = 900
    link_gb: float = 340
    pair_link_gb: float = 285
    nic_gb: float = 40
    latency_us: float = 80
    hop_us: float = 3
    nic_hop_us: float = 8
    gpus_per_node: int = 8
    noise: float = 0

    @classmethod
    def from_json(cls, path: Path) -> Rates:
        """The fields that the file's object names, the rest as they are.

        Raises:
            ArgumentValueError: no object of numbers, or a name that is no field.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ArgumentValueError(f"--rates: {path} is no JSON: {error}") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or not set(found) <= names:
            raise ArgumentValueError(
                f"--rates: expected an object with names out of {', '.join(sorted(names))}"
            )
        bad = [name for name, one in found.items() if not isinstance(one, int | float) or one < 0]
        if bad:
            raise ArgumentValueError(f"--rates: {bad[0]}: expected a number >= 0")
        return cls(**found)


@dataclass(frozen=True)
class Layer:
    """What is computed: `seq_len` tokens, `heads` query heads, `topk` keys a query."""

    seq_len: int = 131072
    heads: int = 128
    topk: int = INDEX_TOPK
    layout: str = "zigzag"
    grad_wire: str = "fp32"
    overlap: bool = True
    """The latents' gather beside the indexer (`kv_gathered=`)."""


@dataclass(frozen=True)
class Work:
    """Of one rank: query-key pairs that the indexer scores, and those that attention reads."""

    scored: int
    attended: int


@dataclass(frozen=True)
class Step:
    """A layer's step on P ranks; times in seconds, of the slowest rank.

    Attributes:
        compute: of all kernels. exposed: what the step takes besides.
        gather_kv, gather_pages, scatter_dkv: each collective alone; kv is gathered twice.
        memory_bytes: of a GPU that all layers share: gathered rows and pages, dKV of all tokens.
        efficiency: the time of one GPU over P times this one's. binds: what takes most.
    """

    ranks: int
    indexer: float
    forward: float
    backward: float
    gather_kv: float
    gather_pages: float
    scatter_dkv: float
    exposed: float
    memory_bytes: int
    efficiency: float
    binds: str

    @property
    def compute(self) -> float:
        """Of the three kernels."""
        return self.indexer + self.forward + self.backward

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.compute + self.exposed


def rank_work(layer: Layer, ranks: int, rank: int) -> Work:
    """Counted from the pages that the layout gives to `rank`."""
    pages = -(-layer.seq_len // PAGE_SIZE)
    if layer.layout == "contiguous":
        size = -(-pages // ranks)
        chunks = [rank]
    else:
        size = -(-pages // (2 * ranks))
        chunks = [rank, 2 * ranks - 1 - rank]
    scored = attended = 0
    for chunk in chunks:
        first = min(chunk * size * PAGE_SIZE, layer.seq_len)
        end = min((chunk + 1) * size * PAGE_SIZE, layer.seq_len)
        scored += _sum_to(end) - _sum_to(first)
        attended += _capped_sum(end, layer.topk) - _capped_sum(first, layer.topk)
    return Work(scored, attended)


def _sum_to(count: int) -> int:
    """1 + 2 + .. + count: keys that the first `count` queries see."""
    return count * (count + 1) // 2


def _capped_sum(count: int, most: int) -> int:
    """The same with at most `most` keys a query."""
    few = min(count, most)
    return _sum_to(few) + (count - few) * most


def local_rows(layer: Layer, ranks: int) -> int:
    """Rows of a shard, padding included."""
    parts = ranks if layer.layout == "contiguous" else 2 * ranks
    pages = -(-layer.seq_len // PAGE_SIZE)
    size = -(-pages // parts)
    return size * parts // ranks * PAGE_SIZE


def collective(total_bytes: float, ranks: int, rates: Rates) -> float:
    """Seconds of an all-gather, a reduce-scatter or an all-to-all of `total_bytes` on all ranks.

    Within a node each rank receives all but its own part; between nodes each node receives what is
    not its own through the network cards of its GPUs. The two are pipelined: the slower one counts.
    """
    if ranks == 1:
        return 0.0
    near = min(ranks, rates.gpus_per_node)
    nodes = ranks / near
    link = rates.pair_link_gb if ranks == 2 else rates.link_gb
    seconds = total_bytes * (1 - 1 / ranks) / (link * 1e9)
    hops = rates.hop_us * math.log2(near)
    if nodes > 1:
        between = total_bytes * (1 - 1 / nodes) / (near * rates.nic_gb * 1e9)
        seconds = max(seconds, between)
        hops += rates.nic_hop_us * math.log2(nodes)
    return seconds + (rates.latency_us + hops) * 1e-6


def step(layer: Layer, ranks: int, rates: Rates) -> Step:
    """A layer's forward and backward on `ranks` GPUs."""
    one = _kernels(layer, 1, rates)
    indexer, forward, backward = _kernels(layer, ranks, rates)
    rows = ranks * local_rows(layer, ranks)
    gather_kv = collective(rows * _KV_BYTES, ranks, rates)
    gather_pages = collective(rows * INDEX_TOKEN_BYTES, ranks, rates)
    scatter_dkv = collective(rows * _WIRE_BYTES[layer.grad_wire], ranks, rates)
    # Pages first, then kv beside the indexer; the backward waits for kv and sends dKV at its end.
    kv_exposed = max(0.0, gather_kv - indexer) if layer.overlap else gather_kv
    exposed = gather_pages + kv_exposed + gather_kv + scatter_dkv
    parts = {
        "indexer": indexer,
        "forward": forward,
        "backward": backward,
        "communication": exposed,
    }
    seconds = sum(parts.values())
    return Step(
        ranks=ranks,
        indexer=indexer,
        forward=forward,
        backward=backward,
        gather_kv=gather_kv,
        gather_pages=gather_pages,
        scatter_dkv=scatter_dkv,
        exposed=exposed,
        memory_bytes=rows * (_KV_BYTES + 4 * D_QK + INDEX_TOKEN_BYTES),
        efficiency=sum(one) / (ranks * seconds),
        binds=max(parts, key=lambda name: parts[name]),
    )


def _kernels(layer: Layer, ranks: int, rates: Rates) -> tuple[float, float, float]:
    """Seconds of the indexer, the forward and the backward, of the rank that takes longest."""

    def times(work: Work) -> tuple[float, float, float]:
        return (
            work.scored * _INDEXER_FLOP / (rates.indexer_tflops * 1e12),
            work.attended * layer.heads * _FORWARD_FLOP / (rates.forward_tflops * 1e12),
            work.attended * layer.heads * _BACKWARD_FLOP / (rates.backward_tflops * 1e12),
        )

    slowest = max((times(rank_work(layer, ranks, rank)) for rank in range(ranks)), key=sum)
    # The expected maximum of P normal draws.
    late = 1 + rates.noise * math.sqrt(2 * math.log(ranks))
    indexer, forward, backward = (one * late for one in slowest)
    return indexer, forward, backward


def sweep(layer: Layer, rates: Rates, most_ranks: int = MOST_RANKS) -> list[Step]:
    """Steps on 1, 2, 4, .. ranks."""
    return [step(layer, 2**power, rates) for power in range(most_ranks.bit_length())]


def falls_below(steps: Sequence[Step], limit: float = ENOUGH) -> Step | None:
    """The first step whose efficiency is below `limit`, if any is."""
    return next((one for one in steps if one.efficiency < limit), None)


def document(layer: Layer, rates: Rates, steps: Sequence[Step]) -> dict[str, Any]:
    """For --json."""
    below = falls_below(steps)
    return {
        "layer": asdict(layer),
        "rates": asdict(rates),
        "steps": [asdict(one) | {"seconds": one.seconds} for one in steps],
        "below_80_percent_at": None if below is None else below.ranks,
    }


def table(layer: Layer, steps: Sequence[Step]) -> tuple[str, list[tuple[str, str]], list[Any]]:
    """Title, columns and rows, as the other tables of `python -m workbench model`."""
    columns = ["ranks", "indexer", "forward", "backward", "kv", "dKV", "exposed", "step"]
    rows = [
        (
            str(one.ranks),
            *(
                _milliseconds(value)
                for value in (
                    one.indexer,
                    one.forward,
                    one.backward,
                    one.gather_kv,
                    one.scatter_dkv,
                    one.exposed,
                    one.seconds,
                )
            ),
            f"{one.memory_bytes / 1e9:.2f}",
            f"{100 * one.efficiency:.0f}%",
            one.binds,
        )
        for one in steps
    ]
    title = (
        f"One layer's step, ms: {layer.seq_len} tokens, H={layer.heads}, topk={layer.topk}, "
        f"{layer.layout}, {layer.grad_wire} wire"
    )
    named = [(name, "right") for name in [*columns, "GB", "eff."]]
    return title, [*named, ("binds", "left")], rows


def _milliseconds(seconds: float) -> str:
    """Three digits, without exponents."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def sentence(steps: Sequence[Step]) -> str:
    """Where more ranks stop paying."""
    below = falls_below(steps)
    if below is None:
        last = steps[-1]
        return f"Efficiency stays at 80 % or more up to {last.ranks} ranks."
    return (
        f"Efficiency falls below 80 % at {below.ranks} ranks ({100 * below.efficiency:.0f} %): "
        f"{_milliseconds(below.exposed)} of {_milliseconds(below.seconds)} ms are communication."
    )
