"""The choice in two levels beside torch's, and beside one level's.

`blocks`: the best 2,048 blocks of 8. `tokens`: the best 512 tokens of those. Torch's path is what
engines run on Hopper: scores of all keys as a matrix, then a maximum of each block and a top-k, or
a mask of the listed blocks and a top-k. The scores are ours, or torch's products of bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashdsa
from flashdsa.bench.cases import Case, Operation, Task, Verdict, products_ceiling, reading_ceiling
from flashdsa.bench.indexer import IndexerInputs, K
from flashdsa.bench.indexer import make_inputs as make_pages
from flashdsa.bench.runner import Peer
from flashdsa.bench.timer import Call
from flashdsa.problem import INDEX_HEAD_DIM, MXFP4_TOKEN_BYTES
from workbench.bench.prefill import make_inputs as make_keys

BLOCK, BLOCKS, TOKENS = 8, 2048, 512
Choose = Callable[..., Any]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Levels:
    """A case's calls: `choose` writes ids, `scores` gives what is ranked, lengths end rows."""

    choose: Choose
    scores: Callable[[], Tensor]
    by_products: Callable[[], Tensor] | None

    def __init__(self, case: Case, device: str, seed: int, backend: str) -> None:
        self.of_blocks = case.options["level"] == "blocks"
        self.paged = not case.options.get("prefill")
        work = 2.0 * case.s * case.s_kv * case.h * INDEX_HEAD_DIM
        self.work, self.ceiling = work, products_ceiling(device)
        if not self.paged:
            keys = make_keys(case, device, seed)
            self.lengths = keys["ends"]
            self.choose = partial(flashdsa.dsa_topk_prefill, **keys, backend=backend)
            self.scores = partial(flashdsa.prefill_logits, **keys, backend=backend)
            self.by_products = partial(products_of_keys, keys)
        else:
            x = make_pages(case, device, seed, backend)
            q, cache, weights, lengths, table, _ = x.operands
            if case.options.get("mxfp4"):
                # Any bytes are codes; scales within 2^4 of each other, around 1.
                shape = (*cache.shape[:3], MXFP4_TOKEN_BYTES)
                cache = torch.randint(256, shape, dtype=torch.uint8, device=device)
                cache.view(len(cache), -1)[:, -4 * cache.shape[1] :] %= 4
                cache.view(len(cache), -1)[:, -4 * cache.shape[1] :] += 125
            self.lengths = x.seq_lens
            self.choose = partial(
                self._choose_pages, (q, cache, weights, lengths, table), backend=backend
            )
            self.scores = partial(
                flashdsa.indexer_logits,
                q,
                cache,
                weights,
                lengths,
                table,
                case.s_kv,
                backend=backend,
            )
            self.by_products = None if case.options.get("mxfp4") else partial(products_of_pages, x)
            self.work, self.ceiling = float(cache.shape[-1] * x.tokens), reading_ceiling(device)
        self.candidates = self.ids(BLOCKS)
        self.choose(topk_indices=self.candidates, block=BLOCK)

    def _choose_pages(self, inputs: Inputs, topk_indices: Tensor, **how: Any) -> None:
        flashdsa.dsa_topk_indexer(*inputs, topk_indices, **how)

    def ids(self, count: int) -> Tensor:
        """Rows of so many ids, poisoned."""
        shape = len(self.lengths), count
        return torch.full(shape, -99, dtype=torch.int32, device=self.lengths.device)

    def task(self) -> Task:
        """The call, held against torch's."""
        options: dict[str, Any] = {"block": BLOCK}
        ids = self.ids(BLOCKS if self.of_blocks else TOKENS)
        if not self.of_blocks:
            options["candidates"] = self.candidates

        def call() -> Tensor:
            self.choose(topk_indices=ids, **options)
            return ids

        return Task(call, self.judge, self.work, self.ceiling, self, exact=True)

    def judge(self, ids: Tensor) -> Verdict:
        """Whether the ids are torch's, but for few: its ties are not ours. Of slots, whether those
        of positions are, and whether as many were written."""
        other, found = self.by_torch(self.scores), ids
        if not self.of_blocks and self.paged:
            found = torch.empty_like(ids)
            self.choose(topk_indices=found, block=BLOCK, candidates=self.candidates, ids="position")
            if bool(((ids < 0) != (found < 0)).any()):
                return Verdict({}, ["not as many slots as positions"])
        same = (found.sort().values == other.int().sort().values).float().mean()
        return Verdict({}, [] if same > 0.999 else [f"{1 - float(same):.1%} of the ids are others"])

    def by_torch(self, score: Callable[[], Tensor]) -> Tensor:
        """Torch's choice by some scores: positions (rows, topk), -1 where there are no more."""
        scores, lengths = score(), self.lengths[:, None]
        rows, width = scores.shape
        count = -(-width // BLOCK)
        if self.of_blocks:
            whole = torch.nn.functional.pad(scores, (0, -width % BLOCK), value=-torch.inf)
            best = whole.view(rows, count, BLOCK).amax(2)
            best.scatter_(1, (lengths.long() - 1) // BLOCK, torch.inf)
        else:
            listed = torch.zeros(rows, count + 1, dtype=torch.bool, device=scores.device)
            ids = torch.where(self.candidates < 0, count, self.candidates).long()
            listed.scatter_(1, ids, True)
            among = listed[:, :count].repeat_interleave(BLOCK, 1)[:, :width]
            best = scores.masked_fill_(~among, -torch.inf)
        most = BLOCKS if self.of_blocks else TOKENS
        chosen = best.topk(min(most, best.shape[1]))
        ids = torch.where(chosen.values == -torch.inf, -1, chosen.indices)
        return torch.nn.functional.pad(ids, (0, most - ids.shape[1]), value=-1)


def make_task(case: Case, device: str, seed: int, backend: str) -> Task:
    """The library's call of the option `level`."""
    return Levels(case, device, seed, backend).task()


def products_of_pages(x: IndexerInputs) -> Tensor:
    """Scores of rows of one length by products of bf16, a row at a time."""
    rows = []
    for row in range(len(x.lengths)):
        keys, scales = x.row_keys(row)
        dots = (x.q[row].bfloat16() @ keys.bfloat16().T).relu()
        rows.append((x.weights[row].bfloat16() @ dots).float() * scales)
    return torch.stack(rows)


def products_of_keys(x: dict[str, Any]) -> Tensor:
    """Scores of queries over shared keys by products of bf16, 64 queries at a time."""
    keys, positions = x["k_index"].bfloat16().T, torch.arange(len(x["k_index"])).to(x["ends"])
    some = []
    for q, weights in zip(x["q_index"].split(64), x["weights"].split(64), strict=True):
        dots = (q.bfloat16().flatten(0, 1) @ keys).relu().unflatten(0, q.shape[:2])
        some.append((weights.bfloat16()[:, None] @ dots)[:, 0].float() * x["k_scale"])
    scores = torch.cat(some)
    return scores.masked_fill_(positions >= x["ends"][:, None], -torch.inf)


def by_torch(_: Case, task: Task) -> tuple[Call, Callable[[object], Verdict]]:
    """The scores' kernel, then torch."""
    levels: Levels = task.inputs
    return partial(levels.by_torch, levels.scores), lambda _: Verdict({}, [])


def by_torch_alone(_: Case, task: Task) -> tuple[Call, Callable[[object], Verdict]]:
    """All of it by torch."""
    levels: Levels = task.inputs
    if levels.by_products is None:
        raise NotImplementedError("torch has no products of MXFP4")
    return partial(levels.by_torch, levels.by_products), lambda _: Verdict({}, [])


def one_level(topk: int, case: Case, task: Task) -> tuple[Call, Callable[[object], Verdict]]:
    """Our own choice of tokens among all."""
    levels: Levels = task.inputs
    ids = levels.ids(topk)
    return partial(levels.choose, topk_indices=ids), lambda _: Verdict({}, [])


def _cases() -> list[Case]:
    cases = []
    sizes = ((1, 128 * K), (8, 32 * K), (32, 16 * K), (64, 32 * K), (64, 128 * K), (128, 64 * K))
    for level in ("blocks", "tokens"):
        for keys in ("e4m3", "mxfp4"):
            for rows, length in sizes:
                name = f"{rows} x {length // K}K, {keys}, {level}"
                options = {"level": level, "mxfp4": keys == "mxfp4"}
                cases.append(Case(rows, length, 32, TOKENS, "fp8", options, name))
        for rows, length in ((4096, 16 * K), (4096, 32 * K), (4096, 64 * K), (2048, 128 * K)):
            name = f"prefill {rows} x {length // K}K, {level}"
            options = {"level": level, "prefill": True}
            cases.append(Case(rows, length, 32, TOKENS, "fp8", options, name))
    return cases


CASES = tuple(_cases())
PEERS: dict[str, Peer] = {
    "our scores, torch": by_torch,
    "torch": by_torch_alone,
    "one level, 512": partial(one_level, 512),
    "one level, 2048": partial(one_level, 2048),
}
OPERATION = Operation("two_levels", make_task, {"cuda": CASES}, ("hot", "captured"))
