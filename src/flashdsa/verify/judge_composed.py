"""Judge the public operations that torch's own make up: kv caches, merging, conversions, losses.

They have no kernel and run where their tensors are; only `indexer_kl_loss` takes a backend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.row_formats import ROW_FORMATS
from flashdsa.verify import calls
from flashdsa.verify.compare import (
    Comparison,
    compare,
    compare_exact,
    compare_lse,
    compare_scores,
    judge_bias,
)
from flashdsa.verify.indexer_training_cases import SHARED_FACTOR, IndexerTrainingInputs
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from flashdsa.verify.tolerances import CHAIN_TOLERANCE, KL_TOLERANCE, tolerance

LOSS_PARTS = 3
"""Parts of the sparse loss: scores, target and KL, each with a limit of its own."""


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def check_merge(case: SparseMlaCase, seed: int, device: str) -> list[Comparison]:
    """Run and judge `merge_attention` on three parts of a case's slots.

    Every third query has no key in the first part, and a query of each length has one in some
    parts only; O of a part without a key is NaN.
    """
    inputs = make_sparse_mla_inputs(case, seed)
    outs, lses = [], []
    for part in range(3):
        own = inputs.indices.clone()
        own[:, torch.arange(case.topk) % 3 != part] = -1
        own[part::3] = -1
        O, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, own, d_v=case.d_v)
        O[lse == math.inf] = torch.nan
        outs.append(O.to(case.dtype).to(device))
        lses.append(lse.float().to(device))
    merged, lse = flashdsa.merge_attention(outs, lses)
    ref_O, ref_lse = reference.merge_attention(outs, lses)
    limits, of_lse = (tolerance(name, out, case.dtype) for name, out in (
        ("sparse_mla_fwd", "O"), ("sparse_mla_fwd", "lse")))  # fmt: skip
    assert of_lse.absolute is not None and of_lse.relative is not None
    sizes = reference.merge_attention([out.abs() for out in outs], lses)[0]
    rows = (1, 2)
    verdict = compare(
        "O",
        merged,
        ref_O,
        norm_tolerance=limits.norm,
        magnitude=sizes,
        row_ndims=rows,
        zero_rows=ref_lse == math.inf,
        dtype=case.dtype,
    )
    return [
        judge_bias(verdict, merged, ref_O, sizes, row_ndims=rows),
        compare_lse(
            "lse",
            lse,
            ref_lse,
            absolute=of_lse.absolute,
            relative=of_lse.relative,
            dtype=torch.float32,
        ),
    ]


def _columns(form: str | None) -> int:
    """Columns of a row of this format; None: of bf16."""
    return 576 if form is None else ROW_FORMATS[form].d_qk


def check_quantize_kv(seed: int, device: str) -> list[Comparison]:
    """Run and judge `quantize_kv`: the bytes of rows of any size, one of them zero."""
    generator = torch.Generator().manual_seed(seed)
    verdicts = []
    for form, scale in (*((form, "ue8m0") for form in ROW_FORMATS), ("v32", "fp32")):
        columns = _columns(form)
        kv = _normal(generator, 300, columns, dtype=torch.bfloat16, device="cpu")
        kv *= torch.exp2(torch.randint(-20, 20, (300, 1), generator=generator)).to(kv.dtype)
        kv[7] = 0
        packed = flashdsa.quantize_kv(kv.to(device), scale=scale, kv_format=form)
        expected = reference.quantize_kv(kv, scale, form)
        verdicts.append(compare_exact(f"rows, {form}, {scale}", packed, expected))
    return verdicts


def _caches(generator: torch.Generator) -> Iterator[tuple[str, str | None, Tensor]]:
    """Caches of 128 slots, in every form and full of random rows, and their rows' formats."""
    rows = _normal(generator, 128, 576, dtype=torch.bfloat16, device="cpu")
    packed = reference.quantize_kv(rows, "ue8m0")
    yield "bf16 rows", None, rows
    yield "bf16 pages", None, rows.view(4, 32, 1, 576)
    yield "packed rows", "v32", packed
    for form, row in ROW_FORMATS.items():
        values = _normal(generator, 128, _columns(form), dtype=torch.bfloat16, device="cpu")
        buffer = torch.randint(256, (2, 64 * row.row_bytes + 80), generator=generator).byte()
        pages = buffer[:, :-80].unflatten(1, (64, 1, row.row_bytes))
        pages.copy_(reference.write_kv_cache(values, torch.arange(128), pages, "ue8m0", form))
        yield f"pages with padding, {form}", form, pages
    yield "packed pages, int8", "v32", packed.view(torch.int8).view(2, 64, 656)


def _moved(cache: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """A copy of the memory of `cache` on a device, gaps included, and the cache in it."""
    size = (cache.shape[0] - 1) * cache.stride(0) + cache[0].numel()
    memory = cache.as_strided((size,), (1,)).clone().to(device)
    return memory, memory.as_strided(cache.shape, cache.stride())


def check_write_kv_cache(seed: int, device: str) -> list[Comparison]:
    """Run and judge `write_kv_cache`: every byte of caches of every form, and of what lies between
    pages; some rows are padding."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(128, generator=generator)[:50]
    slots = torch.where(torch.arange(50) % 7 == 3, -1, slots)
    verdicts = []
    for number, (what, form, cache) in enumerate(_caches(generator)):
        kv = _normal(generator, 50, _columns(form), dtype=torch.bfloat16, device="cpu")
        scale = "fp32" if form in ("v32", None) and number % 2 else "ue8m0"
        of_dtype = slots.to((torch.int64, torch.int32)[number % 2]).to(device)
        memory, written = _moved(cache, device)
        flashdsa.write_kv_cache(kv.to(device), of_dtype, written, scale=scale, kv_format=form)
        after = reference.write_kv_cache(kv, slots, cache, scale, form or "v32")
        expected, place = _moved(cache, "cpu")
        place.copy_(after)
        verdicts.append(compare_exact(what, memory, expected))
    return verdicts


def check_read_kv_cache(seed: int, device: str) -> list[Comparison]:
    """Run and judge `read_kv_cache`: the bits of rows read from caches of every form."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(128, (60,), generator=generator)
    return [
        compare_exact(
            what,
            flashdsa.read_kv_cache(_moved(cache, device)[1], slots.to(device), kv_format=form),
            reference.read_kv_cache(cache, slots, form or "v32").to(torch.bfloat16),
        )
        for what, form, cache in _caches(generator)
    ]


def check_fake_quantize(seed: int, device: str) -> list[Comparison]:
    """Run and judge `fake_quantize_index`: its bits with either scale, and its gradient."""
    generator = torch.Generator().manual_seed(seed)
    x = _normal(generator, 40, 4, 128, dtype=torch.float32, device=device).requires_grad_()
    gradient = torch.randn(x.shape, generator=generator).to(device)
    verdicts = []
    for scale in ("ue8m0", "fp32"):
        found = flashdsa.fake_quantize_index(x, scale=scale)
        expected = reference.fake_quantize_index(x, scale).float()
        verdicts.append(compare_exact(scale, found.detach(), expected))
    found.backward(gradient)
    assert x.grad is not None
    return [*verdicts, compare_exact("gradient", x.grad, gradient)]


def check_causal_ranges(device: str) -> list[Comparison]:
    """Run and judge `causal_ranges`: chunks behind longer sequences, empty ones, too few
    keys, keys that are entries."""
    queries, keys = [0, 5, 5, 9, 12, 12], [0, 20, 31, 33, 40, 44]
    verdicts = []
    for ratio in (1, 4):
        starts, ends = flashdsa.causal_ranges(
            torch.tensor(queries, device=device), torch.tensor(keys, device=device), ratio=ratio
        )
        expected = torch.tensor(reference.causal_ranges(queries, keys, ratio), dtype=torch.int32)
        verdicts += [
            compare_exact(f"starts, ratio {ratio}", starts, expected[:, 0].contiguous()),
            compare_exact(f"ends, ratio {ratio}", ends, expected[:, 1].contiguous()),
        ]
    return verdicts


def check_expand_blocks(seed: int, device: str) -> list[Comparison]:
    """Run and judge `expand_blocks` with and without the queries' own blocks."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-2, 9, (12, 5), generator=generator)
    positions = torch.arange(12)
    verdicts = []
    for block in (1, 4):
        for own in (None, positions):
            found = flashdsa.expand_blocks(
                blocks.to(device), block, positions=None if own is None else own.to(device)
            )
            rows = reference.expand_blocks(
                blocks.tolist(), block, None if own is None else own.tolist()
            )
            expected = torch.tensor(rows, dtype=torch.int32).view(found.shape)
            verdicts.append(compare_exact(f"rows of {block}", found, expected))
    return verdicts


def check_lse_conversions(name: str, seed: int, device: str) -> list[Comparison]:
    """Run and judge one of `lse_for_merge`, `lse_to_base2` and `lse_from_base2`."""
    generator = torch.Generator().manual_seed(seed)
    lse = 30 * torch.randn(8, 16, generator=generator)
    lse[3], lse[5, 2] = math.inf, -math.inf
    expected = {
        "lse_for_merge": lse.double().masked_fill(lse == math.inf, -math.inf),
        "lse_to_base2": lse.double() / math.log(2),
        "lse_from_base2": lse.double() * math.log(2),
    }[name]
    found = getattr(flashdsa, name)(lse.to(device))
    return [compare_lse("lse", found, expected, absolute=0.0, relative=4e-7, dtype=torch.float32)]


def check_kl_loss(inputs: IndexerTrainingInputs, backend: str) -> list[Comparison]:
    """Run and judge `indexer_kl_loss` from q, kv and lse, and its gradients of the mean.

    Gradients are judged by their norms, as those of a chain: each part keeps its own limits.
    """
    attention, lengths = inputs.attention, inputs.attention.topk_length
    dtype = inputs.case.attention.dtype
    _, lse = reference.sparse_mla_fwd(
        attention.q, attention.kv, attention.indices, d_v=attention.case.d_v, **attention.options
    )
    indices = inputs.operands[3]
    given = lse.to(inputs.grad_scores.dtype).to(indices.device)
    loss, gradients = calls.indexer_kl_loss(inputs, given, backend)
    target = reference.attention_target(
        attention.q, attention.kv, given, indices, **attention.options
    )
    scores = reference.indexer_scores(*inputs.operands, topk_length=lengths)
    kl, size = reference.indexer_kl(scores, target)
    share = LOSS_PARTS * KL_TOLERANCE[dtype]
    verdicts = [
        compare_scores(
            "kl",
            loss,
            kl,
            size,
            c=share,
            besides=torch.full_like(size, share),
            dtype=inputs.grad_scores.dtype,
        )
    ]
    row_weight = torch.full_like(kl, calls.mean_weight(inputs))
    d_scores = reference.indexer_kl_bwd(scores, target, row_weight)
    ref = reference.indexer_bwd(*inputs.operands, d_scores, topk_length=lengths)
    expected = (ref.dq_index, ref.dk_index, ref.d_weights)
    for (name, gradient), right in zip(gradients.items(), expected, strict=True):
        verdicts.append(
            compare(name, gradient, right, norm_tolerance=CHAIN_TOLERANCE, row_tolerance=None)
        )
    return verdicts


def check_dense_kl_loss(dtype: torch.dtype, seed: int, device: str) -> list[Comparison]:
    """Run and judge `indexer_kl_loss_dense` in chunks of two queries, and its gradients.

    Ranges begin and end anywhere, outside the keys too; a head sees nothing; keys that no query
    sees are large.
    """
    generator = torch.Generator().manual_seed(seed)
    S, keys, heads, d = 9, 80, 4, 24
    index = [
        _normal(generator, *shape, dtype=dtype, device=device)
        for shape in ((S, 8, 128), (keys, 128), (S, 8))
    ]
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    index[2] = (0.1 * index[2]).to(sums)
    q = _normal(generator, S, heads, d, dtype=dtype, device=device)
    k = _normal(generator, keys, d, dtype=dtype, device=device)
    ranges = [(0, 70), (3, 9), (5, 6), (10, 70), (-4, 17), (20, 20), (0, 1), (69, 70), (30, 65)]
    index[1][70:] = k[70:] = 100.0
    lse = torch.full((S, heads), math.inf, dtype=torch.float64, device=device)
    for s, (first, last) in enumerate(ranges):
        seen = k.double()[max(first, 0) : last]
        if len(seen):
            lse[s] = (d**-0.5 * q[s].double() @ seen.T).logsumexp(-1)
    lse[3, 1] = math.inf
    row_weight = torch.tensor([1.0, 0.5, 0.0, -2.0, 1.0, 1.0, 1.0, 0.25, 1.0], dtype=sums)
    bounds = torch.tensor(ranges, dtype=torch.int32, device=device)
    of_q, of_k, of_weights = leaves = [x.detach().requires_grad_() for x in index]
    loss = flashdsa.indexer_kl_loss_dense(
        of_q,
        of_k,
        of_weights,
        q,
        k,
        lse.to(sums).to(device),
        bounds[:, 1].contiguous(),
        key_start=bounds[:, 0].contiguous(),
        row_weight=row_weight.to(device),
        chunk_bytes=4 * keys * torch.float64.itemsize,
    )
    (SHARED_FACTOR * loss).backward()
    expected, gradients = reference.indexer_kl_loss_dense(
        (index[0], index[1], index[2]), q, k, lse.to(sums), ranges, row_weight
    )
    share = KL_TOLERANCE[dtype]
    verdicts = [
        compare_lse("loss", loss.detach(), expected, absolute=share, relative=share, dtype=sums)
    ]
    for name, leaf, gradient in zip(("q", "k", "weights"), leaves, gradients, strict=True):
        assert leaf.grad is not None
        limits = tolerance("indexer_bwd", "dq_index", dtype)
        verdicts.append(
            compare(
                f"{name}.grad",
                leaf.grad,
                SHARED_FACTOR * gradient,
                norm_tolerance=limits.norm,
                dtype=leaf.dtype,
            )
        )
    return verdicts
