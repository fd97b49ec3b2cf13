"""Run what makes compressed entries and judge every element against the reference."""

from __future__ import annotations

import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.verify.compare import Comparison, compare_exact, compare_scores
from flashdsa.verify.entries_cases import EntriesCase, EntriesInputs
from flashdsa.verify.tolerances import ENTRY_SUMS, ROUNDING, UNDERFLOW

GRADIENTS = ("d_kv", "d_gate", "d_ape", "d_norm_weight")


def _judge(output: str, found: Tensor, ref: Tensor, size: Tensor, dtype: torch.dtype) -> Comparison:
    """The verdict on sums of that size, rounded once to `dtype`."""
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    own = torch.finfo(dtype)
    vanishing = max(UNDERFLOW * torch.finfo(sums).tiny, own.tiny * own.eps)
    # INVARIANT: what nothing is summed into is exactly 0.
    besides = ROUNDING[dtype] * ref.abs() + torch.where(size > 0, vanishing, 0.0)
    return compare_scores(
        output, found, ref, size, c=ENTRY_SUMS[sums], besides=besides, dtype=dtype
    )


def _rows(x: Tensor, count: int) -> Tensor:
    """`x` with rows of 0 up to that many."""
    return torch.cat([x, x.new_zeros(count - len(x), *x.shape[1:])])


def judge_forward(inputs: EntriesInputs, entries: Tensor) -> Comparison:
    """The verdict on the entries of a whole call."""
    offsets = inputs.cu_seqlens.tolist()
    found = reference.compress_kv(*inputs.operands, cu_seqlens=offsets, **inputs.options)
    rows = inputs.case.tokens // inputs.case.ratio
    ref, size = (_rows(x, rows) for x in found)
    return _judge("entries", entries, ref, size, inputs.case.dtype)


def check_forward(inputs: EntriesInputs, backend: str) -> list[Comparison]:
    """Run and judge `compress_kv`: whole, and in chunks with a state."""
    whole = flashdsa.compress_kv(
        *inputs.operands, cu_seqlens=inputs.cu_seqlens, backend=backend, **inputs.options
    )
    assert whole is not None
    return [judge_forward(inputs, whole), _check_chunks(inputs, whole, backend)]


def _check_chunks(inputs: EntriesInputs, whole: Tensor, backend: str) -> Comparison:
    """Compare the bits of calls that bring some tokens of each sequence with those of `whole`."""
    case, device, begins = inputs.case, inputs.kv.device, inputs.cu_seqlens.tolist()
    ratio, count, step = case.ratio, len(case.lengths), case.ratio // 2 + 3
    of_sequences = whole.split([x // ratio for x in case.lengths] + [len(whole) - _entries(case)])
    rows = ratio * (1 + case.overlap) + 1
    state = inputs.kv.new_full((count, rows, 2, inputs.kv.shape[1]), torch.nan)
    results, expected = [whole[:0]], [whole[:0]]
    for first in range(0, max(case.lengths), step):
        seen = [min(first, x) for x in case.lengths]
        ends = [min(first + step, x) for x in case.lengths]
        spans = list(zip(begins, seen, ends, strict=False))
        padding = torch.arange(begins[-1], case.tokens)
        tokens = torch.cat([*(torch.arange(b + s, b + e) for b, s, e in spans), padding]).to(device)
        taken = torch.tensor([0, *(e - s for _, s, e in spans)]).cumsum(0)
        found = flashdsa.compress_kv(
            inputs.kv[tokens],
            inputs.gate[tokens],
            inputs.ape,
            cu_seqlens=taken.to(device),
            state=state,
            seen=torch.tensor(seen, device=device),
            backend=backend,
            **inputs.options,
        )
        assert found is not None
        results.append(found)
        own = [
            x[s // ratio : e // ratio] for x, (_, s, e) in zip(of_sequences, spans, strict=False)
        ]
        expected.append(_rows(torch.cat(own), len(found)))
    return compare_exact("in chunks", torch.cat(results), torch.cat(expected))


def _entries(case: EntriesCase) -> int:
    return sum(length // case.ratio for length in case.lengths)


def judge_backward(
    inputs: EntriesInputs, found: tuple[Tensor, ...], prefix: str = ""
) -> list[Comparison]:
    """The verdicts on the four gradients; those of missing operands are empty."""
    case = inputs.case
    ref, sizes = reference.compress_kv_bwd(
        inputs.kv,
        inputs.gate,
        inputs.grad_entries,
        inputs.ape,
        cu_seqlens=inputs.cu_seqlens.tolist(),
        **inputs.options,
    )
    verdicts = []
    givens = inputs.kv, inputs.gate, inputs.ape, inputs.norm_weight
    for name, own, right, size, given in zip(GRADIENTS, found, ref, sizes, givens, strict=True):
        if given is None:
            right = size = right.new_empty(0)
        dtype = own.dtype if given is None else given.dtype
        verdicts.append(_judge(prefix + name, own, right, size, dtype))
    assert found[0].dtype == found[1].dtype == case.dtype
    return verdicts


def check_backward(inputs: EntriesInputs, backend: str) -> list[Comparison]:
    """Run and judge `compress_kv_bwd`, and autograd's way to it."""
    options = {"cu_seqlens": inputs.cu_seqlens, "backend": backend, **inputs.options}
    found = flashdsa.compress_kv_bwd(
        inputs.kv, inputs.gate, inputs.grad_entries, inputs.ape, **options
    )
    verdicts = judge_backward(inputs, found)
    leaves = [
        None if x is None else x.detach().requires_grad_()
        for x in (*inputs.operands, inputs.norm_weight)
    ]
    kv, gate, ape, options["norm_weight"] = leaves
    assert kv is not None and gate is not None
    entries = flashdsa.compress_kv(kv, gate, ape, **options)
    assert entries is not None
    entries.backward(inputs.grad_entries)
    for name, leaf, expected in zip(GRADIENTS, leaves, found, strict=True):
        if leaf is not None:
            assert leaf.grad is not None
            verdicts.append(compare_exact(f"{name}, autograd", leaf.grad, expected))
    return verdicts


def check_rotation(dtype: torch.dtype, seed: int, device: str) -> list[Comparison]:
    """Run and judge `rotate_tail`, both ways, and its gradient."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    x, gradient = (torch.randn(7, 3, 40, generator=generator).to(device, dtype) for _ in range(2))
    angles = 6.3 * torch.rand(50, 8, generator=generator).double()
    rotation = angles.cos().to(device, sums), angles.sin().to(device, sums)
    positions = torch.randint(50, (7,), generator=generator)
    verdicts = []
    for inverse in (False, True):
        leaf = x.detach().requires_grad_()
        turned = flashdsa.rotate_tail(leaf, positions.to(device), rotation, inverse=inverse)
        turned.backward(gradient)
        assert leaf.grad is not None
        for name, own, given, back in (
            ("turned", turned.detach(), x, inverse),
            ("gradient", leaf.grad, gradient, not inverse),
        ):
            places, tables = positions.tolist(), (rotation[0].abs(), -rotation[1].abs())
            right = reference.rotate_tail(given, places, rotation, inverse=back)
            size = reference.rotate_tail(given.abs(), places, tables).abs()
            size += reference.rotate_tail(given.abs(), places, tables, inverse=True).abs()
            verdicts.append(_judge(f"{name}, inverse={inverse}", own, right, size, dtype))
    return verdicts
