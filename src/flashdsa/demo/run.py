"""The whole demo: text, training, comparison with dense attention, error table, picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from flashdsa.demo.context_parallel import make_trainer, untrained
from flashdsa.demo.device import device_name, require_device, served_operations
from flashdsa.demo.error_table import error_table
from flashdsa.demo.evaluate import Evaluation, Evaluator
from flashdsa.demo.options import DemoOptions
from flashdsa.demo.picture import draw_picture
from flashdsa.demo.result import DemoResult, StepRecord
from flashdsa.demo.text import Corpus, load_corpus
from flashdsa.demo.train import Trainer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Progress = Callable[[int, int, str], None]

# Besides the training steps: text, first look, error table, picture.
OTHER_STAGES = 4


class _Clock:
    """Wall time by part of the run."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @property
    def total(self) -> float:
        return time.perf_counter() - self.started


class _Ticker:
    """Counts stages and tells `on_progress` (done, total, what is going on)."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self.done, self.total, self.on_progress = 0, total, on_progress

    def tell(self, message: str, finished: int = 0) -> None:
        self.done += finished
        if self.on_progress is not None:
            self.on_progress(self.done, self.total, message)


def run_demo(
    options: DemoOptions, on_progress: Progress | None = None, mesh: DeviceMesh | None = None
) -> DemoResult:
    """Train a small byte model with sparse attention on installed text and judge it.

    on_progress, where given, is called with (done, total, message) as the run proceeds. The
    global random state of torch is left as it was. Writes `options.picture` and, where
    given, `options.indices`. With a `mesh` the training is spread over its processes; the others
    call `context_parallel.train_along`.
    """
    require_device(options.device)
    options.require_writable_files()
    clock = _Clock()
    ticker = _Ticker(options.steps + OTHER_STAGES, on_progress)
    ticker.tell("reading the text that Python ships")
    with clock.part("text"):
        corpus = load_corpus()
        _require_enough_text(corpus, options)
    model, indexer = untrained(options)
    trainer = make_trainer(model, indexer, corpus.train, options, mesh)
    ticker.tell("looking at the untrained model", finished=1)
    evaluator = Evaluator(corpus.held_out, options)
    with clock.part("evaluation"):
        evaluations = [evaluator.evaluate(model, indexer, step=0)]
    ticker.tell("training", finished=1)
    steps = _train(trainer, evaluator, evaluations, clock, ticker)
    ticker.tell("comparing with float64")
    with clock.part("errors"):
        errors = error_table(model, indexer, corpus.held_out, options)
    ticker.tell("drawing the picture", finished=1)
    after = evaluations[-1]
    with clock.part("picture"):
        draw_picture(options, steps, evaluations)
    if options.indices is not None:
        torch.save(after.indices.cpu(), options.indices)
    ticker.tell("done", finished=1)
    return DemoResult(
        options=options,
        text_sources=corpus.sources,
        train_bytes=len(corpus.train),
        held_out_bytes=len(corpus.held_out),
        steps=tuple(steps),
        held_out=tuple(evaluation.record for evaluation in evaluations),
        differences=after.differences,
        errors=errors,
        examples=after.examples,
        picture=str(options.picture),
        seconds=clock.total,
        seconds_by_part=clock.seconds,
        processes=1 if mesh is None else mesh.size(),
        device_name=device_name(options.device),
        served=served_operations(options.device, options.backend),
    )


def _require_enough_text(corpus: Corpus, options: DemoOptions) -> None:
    shortest = min(len(corpus.train), len(corpus.held_out))
    if options.window >= shortest:
        raise ValueError(
            f"window: expected less than {shortest} bytes, the held-out text that this Python "
            f"ships; got {options.window}"
        )


def _train(
    trainer: Trainer,
    evaluator: Evaluator,
    evaluations: list[Evaluation],
    clock: _Clock,
    ticker: _Ticker,
) -> list[StepRecord]:
    """Take all steps; append an evaluation every `eval_every` of them, behind the indexer's warm-up
    and after the last."""
    records: list[StepRecord] = []
    options = trainer.options
    for step in range(1, options.steps + 1):
        with clock.part("training"):
            losses = trainer.step()
        records.append(StepRecord(step, losses.language, losses.indexer))
        if step % options.eval_every == 0 or step in (options.warm_up_steps, options.steps):
            with clock.part("evaluation"):
                evaluations.append(evaluator.evaluate(trainer.model, trainer.indexer, step))
        ticker.tell(f"training, {losses.language:.2f} nats per byte", finished=1)
    return records
