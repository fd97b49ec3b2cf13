"""Timed calls that make compressed entries, and their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.bench import cases


class Form(NamedTuple):
    """A model's windows: tokens, columns of an entry, overlap, bias, norm with rotation."""

    ratio: int
    d: int
    overlap: bool = False
    ape: bool = True
    finished: bool = True


FORMS = {
    "CSA": Form(4, 512, overlap=True),
    "CSA's index keys": Form(4, 128, overlap=True),
    "HCA": Form(128, 512),
    "V4.1": Form(2, 512, ape=False),
    "pools of 4": Form(4, 128, finished=False),
}
HALF = 32
"""Pairs of columns that are rotated."""


class EntriesInputs(NamedTuple):
    """kv, gate (T, width), grad (T // ratio, d) bf16, ape (ratio, width); options of the call."""

    kv: Tensor
    gate: Tensor
    grad: Tensor
    ape: Tensor | None
    options: dict[str, Any]


def make_inputs(form: Form, tokens: int, device: str, seed: int) -> EntriesInputs:
    """Standard normal, one sequence."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, device=device, generator=generator)
    width = form.d * (1 + form.overlap)
    options: dict[str, Any] = {"ratio": form.ratio, "overlap": form.overlap}
    if form.finished:
        angles = 6.3 * torch.rand(tokens, HALF, device=device, generator=generator)
        options |= {"norm_weight": normal(form.d), "rotation": (angles.cos(), angles.sin())}
    return EntriesInputs(
        normal(tokens, width).bfloat16(),
        normal(tokens, width).bfloat16(),
        normal(tokens // form.ratio, form.d).bfloat16(),
        normal(form.ratio, width) if form.ape else None,
        options,
    )


def make_entries(case: cases.Case, device: str, seed: int, backend: str) -> cases.Task:
    """A direction, or both. Options: form, what. `s_kv` tokens."""
    form, what = FORMS[case.options["form"]], case.options["what"]
    x = make_inputs(form, case.s_kv, device, seed)
    options = {**x.options, "backend": backend}

    def forward() -> Any:
        return flashdsa.compress_kv(x.kv, x.gate, x.ape, **options)

    def backward() -> tuple[Tensor, ...]:
        return flashdsa.compress_kv_bwd(x.kv, x.gate, x.grad, x.ape, **options)

    calls = {
        "forward": lambda: (forward(),),
        "backward": backward,
        "both": lambda: (forward(), *backward()),
    }
    read, entries = 2 * x.kv.nbytes, x.grad.nbytes
    work = {"forward": read + entries, "backward": 2 * read + entries}
    work["both"] = sum(work.values())
    return cases.Task(
        calls[what], partial(judge_entries, what, x), work[what], cases.reading_ceiling(device), x
    )


def judge_entries(what: str, x: EntriesInputs, found: tuple[Tensor, ...]) -> cases.Verdict:
    """The first windows' entries and gradients; all gradients are finite."""
    errors: dict[str, tuple[float, float]] = {}
    ratio = x.options["ratio"]
    reach = 2 * ratio
    parts = [found[0]] if what != "backward" else []
    given = {**x.options, "cu_seqlens": [0, reach]}
    first = x.kv[:reach], x.gate[:reach]
    if parts:
        right, _ = reference.compress_kv(*first, x.ape, **given)
        errors["entries"] = (cases.norm_error(parts[0][:2], right), 4e-3)
    if what != "forward":
        gradients = found[-4:]
        right_gradients, _ = reference.compress_kv_bwd(*first, x.grad[:2], x.ape, **given)
        # A third entry pools the second window's first columns.
        whole = ratio if x.options["overlap"] else reach
        for name, own, expected in zip(
            ("d_kv", "d_gate"), gradients, right_gradients, strict=False
        ):
            errors[name] = (cases.norm_error(own[:whole], expected[:whole]), 4e-3)
        if not all(bool(one.isfinite().all()) for one in gradients):
            errors["gradients"] = (float("nan"), 0.0)
    return cases.judge_errors(errors)


def _case(form: str, what: str, tokens: int) -> cases.Case:
    options = {"form": form, "what": what}
    return cases.Case(1, tokens, 1, 1, options=options, name=f"{form}, {tokens} tokens, {what}")


ENTRIES_CASES = tuple(
    _case(form, what, tokens)
    for tokens in (65_536, 4096)
    for form in FORMS
    for what in ("forward", "backward", "both")
)
_CPU = tuple(_case(form, what, 1024) for form in FORMS for what in ("forward", "backward"))
OPERATIONS = (cases.Operation("entries", make_entries, {"cpu": _CPU, "cuda": ENTRIES_CASES}),)
