"""The whole demo: text, training, looks at held-out text, picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from examples.demo.model import ByteModel
from examples.demo.picture import draw_picture
from examples.demo.text import load_text
from examples.demo.train import FORMS, DemoOptions, Trainer, evaluate
from flashdsa.backends.catalog import registry
from flashdsa.backends.registry import resolve_backend
from flashdsa.errors import ArgumentValueError
from flashdsa.output_paths import written

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"window": 1280, "num_queries": 256, "topk": 256, "num_heads": 4},
    "cuda": {"window": 4096, "num_queries": 2048, "topk": 512, "num_heads": 16},
}
V4_SIZES: dict[str, dict[str, Any]] = {
    "cpu": SIZES["cpu"] | {"topk": 64},
    "cuda": SIZES["cuda"] | {"window": 12288},
}
"""Sizes of form "v4", whose keys are entries of four bytes."""
HOPPER = (9, 0)  # the compute capability with kernels for every operation of the demo


def choose_device(device: str, backend: str) -> str:
    """The device that `device` names; of "auto" the GPU if kernels serve the whole demo there."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ArgumentValueError("device: expected auto or cpu: torch finds no GPU; got 'cuda'")
    if device != "auto":
        return device
    wanted = has_gpu and resolve_backend(backend) in ("auto", "sm90")
    return "cuda" if wanted and torch.cuda.get_device_capability() == HOPPER else "cpu"


def run_demo(
    options: DemoOptions, on_progress: Callable[[int, int, str], None] = lambda *_: None
) -> dict[str, Any]:
    """Train a byte model with sparse attention on installed text, judge it, draw `options.picture`.

    on_progress is called with (steps done, steps in all, what runs now). The global random state of
    torch is left as it was. Returns all numbers, ready for JSON; losses are nats per byte.
    """
    began = time.perf_counter()
    on_progress(0, options.steps, "reading the text that Python ships")
    train, held_out = load_text()
    if options.window >= len(held_out):
        raise ArgumentValueError(
            f"window: expected less than {len(held_out)} bytes, the held-out text that this Python "
            f"ships; got {options.window}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        sizes = options.num_heads, options.num_queries, options.topk
        model = ByteModel(*sizes, options.backend, FORMS[options.form])
    trainer = Trainer(model.to(options.device), train, options)
    looks, losses = [evaluate(model, held_out, options, step=0)], []
    for step in range(1, options.steps + 1):
        losses.append(trainer.step(step))
        if step % options.eval_every == 0 or step in (options.warm_up_steps, options.steps):
            looks.append(evaluate(model, held_out, options, step))
        on_progress(step, options.steps, f"training, {losses[-1][0]:.2f} nats per byte")
    draw_picture(options, [language for language, _ in losses], looks)
    if options.indices is not None:
        with written(options.indices) as draft, draft.open("wb") as file:
            torch.save(looks[-1].indices, file)
    chosen = registry.chosen(options.device) | registry.chosen(options.device, options.backend)
    files = {"picture": str(options.picture), "indices": options.indices and str(options.indices)}
    return {
        "options": asdict(options) | files,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "the CPU",
        "served": {operation: backend for operation, backend in chosen.items()},
        "train_bytes": len(train),
        "held_out_bytes": len(held_out),
        "steps": [{"train_loss": language, "indexer_kl": kl} for language, kl in losses],
        "held_out": [dict(zip(look._fields, look[:7], strict=False)) for look in looks],
        "seconds": time.perf_counter() - began,
    }
