"""Held-out text: losses with sparse and dense attention, and how good the chosen keys are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashdsa.demo.attention import dense_attended, dense_probabilities, run_sparse
from flashdsa.demo.indexer import LightningIndexer
from flashdsa.demo.model import ByteModel
from flashdsa.demo.options import DemoOptions
from flashdsa.demo.paging import PagePool
from flashdsa.demo.result import CapturedMass, Example, HeldOutRecord, OutputDifference
from flashdsa.demo.train import cut_windows, language_loss

NUM_EXAMPLES = 3
EXAMPLE_BYTES = 24  # of text that a query has read
ASCII_END = 0x7F
FOLLOWING_BYTES = 14  # of text from the key's byte on
EXAMPLE_SPACING = 48  # between two examples' queries, so that they tell different stories


@dataclass(frozen=True)
class ChoiceMap:
    """One window's choices; row r is the query at position `first_query` + r."""

    first_query: int
    chosen: Tensor  # [S, T] bool
    attention: Tensor  # [S, T] float32, dense, mean over heads

    @property
    def captured(self) -> float:
        """Share of dense attention's mass that lies on chosen keys."""
        return float(self.attention[self.chosen].sum() / self.attention.sum())


@dataclass(frozen=True)
class Evaluation:
    """What one look at the held-out text gives."""

    record: HeldOutRecord
    choice_map: ChoiceMap  # of the first window
    differences: tuple[OutputDifference, ...]
    examples: tuple[Example, ...]
    indices: Tensor  # [batch, S, topk] int32: what each window's queries chose, physical ids


class Evaluator:
    """Owns the held-out windows and their pages, the same at every evaluation."""

    def __init__(self, text: Tensor, options: DemoOptions) -> None:
        """Cut evenly spaced windows from text [n] uint8."""
        self.options = options
        last = len(text) - options.window - 1
        starts = torch.linspace(0, last, options.eval_windows).long()[:, None]
        windows = cut_windows(text, starts, options.window)
        self.tokens, self.targets = (one.to(options.device) for one in windows)
        generator = torch.Generator().manual_seed(options.seed)
        self.pool = PagePool.shuffled(len(starts), options.window, generator, options.device)

    @torch.no_grad()
    def evaluate(self, model: ByteModel, indexer: LightningIndexer, step: int) -> Evaluation:
        """Run the same weights sparsely and densely on every window."""
        options = self.options
        output = run_sparse(
            model,
            indexer,
            self.tokens,
            self.pool,
            num_queries=options.num_queries,
            topk=options.topk,
            backend=options.backend,
        )
        attended = dense_attended(output.projections)
        logits = model.read_out(output.projections.hidden, attended)
        positions = self.pool.positions_of(output.indices, options.num_queries)
        chosen = _as_mask(positions, options.window).unflatten(0, (-1, options.num_queries))
        rows = torch.arange(options.num_queries, device=options.device)
        attention = dense_probabilities(output.projections, rows).mean(dim=1)  # [batch, S, T]
        first_query = options.window - options.num_queries
        record = HeldOutRecord(
            step,
            sparse_loss=language_loss(output.logits, self.targets).item(),
            dense_loss=language_loss(logits, self.targets).item(),
            captured=captured_mass(chosen, attention, options.topk),
        )
        return Evaluation(
            record,
            ChoiceMap(first_query, chosen[0], attention[0]),
            (
                _difference("attended latents", output.attended.float(), attended),
                _difference("logits", output.logits, logits),
            ),
            _examples(self.tokens, self.targets, chosen, attention, options.topk),
            output.indices.unflatten(0, (-1, options.num_queries)),
        )


def captured_mass(chosen: Tensor, attention: Tensor, topk: int) -> CapturedMass:
    """chosen [batch, S, T] bool, attention [batch, S, T] with rows summing to 1."""
    num_queries, window = chosen.shape[1:]
    key = torch.arange(window, device=chosen.device)
    query = key[-num_queries:, None]  # [S, 1]
    recent = (key <= query) & (key > query - topk)  # [S, T]

    def share(mask: Tensor) -> float:
        return (attention * mask).sum(dim=-1).mean().item()

    return CapturedMass(
        indexer=share(chosen),
        recent=share(recent),
        random=(topk / (query + 1)).mean().item(),
        best=attention.topk(topk, dim=-1).values.sum(dim=-1).mean().item(),
    )


def _as_mask(positions: Tensor, window: int) -> Tensor:
    """positions [rows, topk], -1 for none -> bool [rows, window]."""
    shape = positions.shape[0], window + 1
    mask = torch.zeros(shape, dtype=torch.bool, device=positions.device)
    mask.scatter_(1, positions.remainder(window + 1).long(), True)  # -1 lands in the extra column
    return mask[:, :window]


def _difference(output: str, sparse: Tensor, dense: Tensor) -> OutputDifference:
    difference = sparse - dense
    relative = (difference.norm() / dense.norm()).item()
    return OutputDifference(output, difference.abs().max().item(), relative)


def _examples(
    tokens: Tensor, targets: Tensor, chosen: Tensor, attention: Tensor, topk: int
) -> tuple[Example, ...]:
    """Chosen keys beyond the newest `topk` that drew the most attention and knew the next byte.

    Only printable ASCII bytes count: a space found is no story.
    """
    num_queries, window = chosen.shape[1:]
    key_at = torch.arange(window, device=tokens.device)
    query = key_at[-num_queries:]
    far = key_at <= query[:, None] - topk  # [S, T]
    right = tokens[:, None, :] == targets[:, -num_queries:, None]  # [batch, S, T]
    printable = ((tokens > ord(" ")) & (tokens < ASCII_END))[:, None, :]  # [batch, 1, T]
    weight = torch.where(chosen & far & right & printable, attention, 0)
    heaviest, key = weight.max(dim=-1)  # [batch, S]
    examples: list[Example] = []
    used: list[tuple[int, int]] = []
    for flat in heaviest.flatten().argsort(descending=True, stable=True).tolist():
        window_index, row = divmod(flat, num_queries)
        close = (abs(row - r) < EXAMPLE_SPACING for w, r in used if w == window_index)
        if len(examples) == NUM_EXAMPLES or heaviest[window_index, row] == 0:
            break
        if any(close):
            continue
        used.append((window_index, row))
        text = bytes(tokens[window_index].tolist())
        at, found = int(query[row]), int(key[window_index, row])
        examples.append(
            Example(
                query_text=_readable(text[at + 1 - EXAMPLE_BYTES : at + 1]),
                key_text=_readable(text[max(0, found - EXAMPLE_BYTES) : found]),
                followed_by=_readable(text[found : found + FOLLOWING_BYTES]),
                distance=at + 1 - found,
                attention=float(heaviest[window_index, row]),
            )
        )
    return tuple(examples)


def _readable(text: bytes) -> str:
    """Text with every line break shown as one character, so that it stays on one line."""
    return text.decode("utf-8", errors="replace").replace("\n", "⏎")
