"""Pages of any number of rows in both sources, and ids that name no row in many ways."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.row_formats import ROW_FORMATS, SHIPPED
from tests.support.formulas import assert_close, attention
from tests.support.subtests import CaseLoop

PAGE_SIZES = (2, 53, 61, 69, 576)
INVALID = (-(2**31), -123456, -1, None, 2**31 - 1)
"""Ids that name no row; None: the number of rows."""


def backends_of(backend: str) -> tuple[str, ...]:
    """A backend, and torch beside the CPU's, whose tensors it takes, too."""
    return (backend, "torch") if backend == "cpu" else (backend,)


def cache_of(
    name: str, page_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages apart of a format with random rows in 20 slots, and NaN in every other byte.

    Returns:
        (pages, page_size, 1, bytes) uint8, all rows (n, 512) fp64, and ids (2, 24) int32.
    """
    form = ROW_FORMATS[name]
    size = -(-form.page_bytes(page_size) // 16) * 16 + 48
    memory = torch.full((-(-130 // page_size), size), 0xFF, dtype=torch.uint8)
    cache = memory[:, : page_size * form.row_bytes].unflatten(1, (page_size, 1, form.row_bytes))
    named = torch.randperm(len(memory) * page_size, generator=generator)[:20]
    rows = torch.randn(len(named), form.d_qk, generator=generator)
    flashdsa.write_kv_cache(rows, named, cache, kv_format=name)
    lists = named[torch.randint(20, (2, 24), generator=generator)].int()
    return cache, reference.unpack_kv(cache, name), lists


def test_pages_of_every_size_in_both_sources(
    subtests: CaseLoop, backend: str, device: str, seed: int
) -> None:
    """Each pair of sizes, the formats in turn; rows that no slot names are NaN in every byte."""
    generator = torch.Generator().manual_seed(seed)
    names = [form.name for form in SHIPPED if form.d_qk == 512]
    q = torch.randn(2, 8, 512, generator=generator).bfloat16()
    for number, sizes in enumerate(product(PAGE_SIZES, PAGE_SIZES)):
        name = names[number % len(names)]
        sources = [cache_of(name, size, generator) for size in sizes]
        (_, rows, first), (_, others, second) = sources
        lists = [
            [*a, *(len(rows) + slot for slot in b)]
            for a, b in zip(first.tolist(), second.tolist(), strict=True)
        ]
        expected, _ = attention(q, torch.cat([rows, others]), lists, 512**-0.5)
        for served_by in backends_of(backend):
            with subtests.test(f"{served_by}, {name}, pages of {sizes}"):
                kv, extra = (cache.to(device) for cache, _, _ in sources)
                got, _ = flashdsa.sparse_mla_fwd(
                    q.to(device), kv, first.to(device), extra_kv=extra, kv_format=name,
                    extra_indices=second.to(device), backend=served_by,
                )  # fmt: skip
                assert_close(got.cpu(), expected, 5e-3)


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "packed"])
def test_ids_that_name_no_row_in_many_ways_are_all_minus_one(
    packed: bool, backend: str, device: str, seed: int
) -> None:
    """Mixed in one list: the bits, gradients too, are those of a list with -1 in their place."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(3, 8, 576, generator=generator).bfloat16().to(device)
    rows = torch.randn(50, 576, generator=generator).bfloat16()
    kv = (flashdsa.quantize_kv(rows) if packed else rows).to(device)
    ids = torch.randint(50, (3, 70), generator=generator)
    wrong = torch.tensor([len(rows) if one is None else one for one in INVALID])
    drawn = torch.randint(2 * len(wrong), ids.shape, generator=generator)
    mixed = torch.where(drawn < len(wrong), wrong[drawn % len(wrong)], ids)
    plain = torch.where(drawn < len(wrong), -1, ids)
    assert all((mixed[0] == one).any() for one in wrong)
    for served_by in backends_of(backend):
        results = []
        for indices in (mixed.int().to(device), plain.int().to(device)):
            O, lse = flashdsa.sparse_mla_fwd(q, kv, indices, backend=served_by)
            given = (q, kv, O, lse, O, indices)
            more = () if packed else flashdsa.mla_bwd(*given, deterministic=True, backend=served_by)
            results.append((O, lse, *more))
        for one, other in zip(*results, strict=True):
            assert one is other is None or torch.equal(one, other)
