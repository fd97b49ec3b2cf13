"""Every tensor of every operation as a view into a larger buffer: the result of the call without
gaps, and nothing written beside the view; or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs
from flashdsa.verify.layouts import pages_apart, strided_copy
from tests.support.subtests import CaseLoop
from workbench.public_calls import Call, public_calls

Arguments = dict[str, Any]
View = Callable[[Tensor], Tensor]

INDEXER_CASES = {
    "rows": IndexerCase("", (600, 0, 530), 512, 16),
    "requests": IndexerCase("", (600, 601, 530, 70), 512, 16, next_n=2),
    "keys of 68 bytes": IndexerCase("", (300, 70), 90, 16, mxfp4=True),
    "blocks": IndexerCase("", (300, 65), 20, 16, block=8),
    "candidates": IndexerCase("", (300, 65), 70, 16, block=8, num_candidates=20),
    "a slot a token": IndexerCase("", (600, 530), 512, 64, table_page_size=1),
}


def indexer_calls() -> dict[str, Call]:
    """The indexer's forms, in the order of kernels' families."""
    calls = {}
    for name, case in INDEXER_CASES.items():
        x = make_indexer_inputs(case, seed=1)
        q, cache, weights, lengths, table = x.operands
        rows: Arguments = {
            "q_index_fp8": x.of_requests(q),
            "k_index_cache_fp8": cache,
            "weights": x.of_requests(weights),
            "seq_lens": x.of_requests(lengths),
            "block_table": table,
        }
        options = {"table_page_size": case.table_page_size}
        if case.next_n == 1 and not case.block > 1:
            arguments = {**rows, **options, "max_len": x.max_len}
            calls[f"indexer_logits, {name}"] = Call(flashdsa.indexer_logits, arguments)
        ids = x.of_requests(x.output_buffer())
        candidates = {} if x.candidates is None else {"candidates": x.candidates}
        arguments = {**rows, **options, "topk_indices": ids, **candidates, "block": case.block}
        calls[f"dsa_topk_indexer, {name}"] = Call(
            flashdsa.dsa_topk_indexer, arguments, ("topk_indices",)
        )
    return calls


CALLS = {**public_calls("cpu"), **indexer_calls()}
CACHES = "cache", "k_index_cache_fp8"


def as_bytes(view: View, x: Tensor) -> Tensor:
    """A view of any dtype, of which some have no fill."""
    return view(x.view(torch.uint8)).view(x.dtype) if x.itemsize == 1 else view(x)


def views(x: Tensor) -> Iterator[tuple[str, View]]:
    """Ways to lie in a larger buffer; the first element is not the buffer's."""
    if x.dim() and x.numel():
        yield "rows apart", partial(as_bytes, strided_copy)
        if x.dim() > 2:
            yield "pages apart", partial(as_bytes, pages_apart)


def tensors_of(arguments: Mapping[str, Any]) -> Iterator[tuple[str, int | None, Tensor]]:
    """(argument, place in it if it is a pair, tensor)."""
    for name, value in arguments.items():
        for place, one in enumerate(value) if isinstance(value, tuple) else ((None, value),):
            if isinstance(one, Tensor):
                yield name, place, one


def changed(arguments: Arguments, name: str, place: int | None, view: View) -> Arguments:
    """The arguments with one tensor elsewhere."""
    if place is None:
        return {**arguments, name: view(arguments[name])}
    pair = list(arguments[name])
    pair[place] = view(pair[place])
    return {**arguments, name: tuple(pair)}


def results(call: Call, arguments: Arguments, **options: Any) -> list[Tensor]:
    """What the call returns and writes, as bytes without gaps."""
    given = call.function(**arguments, **options)
    returned = [given] if isinstance(given, Tensor) else list(given or ())
    tensors = [*returned, *(arguments[name] for name in call.written)]
    return [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in tensors]
