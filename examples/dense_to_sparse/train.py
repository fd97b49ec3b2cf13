"""The stages: dense, then the indexer alone against dense attention, then all of it, sparse."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

import flashdsa
from examples.dense_to_sparse.model import SM_SCALE, Attended, Attention, ByteModel
from examples.dense_to_sparse.text import windows

STAGES = ("dense", "warm_up", "sparse", "dense_control")
"""In the order in which they run. The control goes on from `dense` as `sparse` does, but stays
dense; with as many steps, losses are compared at equal steps."""
FOLLOWS = {"warm_up": "dense", "sparse": "warm_up", "dense_control": "dense"}
LEARN = {
    "dense": {"rest"}, "warm_up": {"indexer"}, "sparse": {"indexer", "rest"},
    "dense_control": {"rest"},
}  # fmt: skip
RATES = {"dense": 6e-4, "warm_up": 1e-3, "sparse": 2e-4, "dense_control": 2e-4}
RISING_STEPS = 20


@dataclass(frozen=True)
class Recipe:
    """Steps of each stage, tokens of a window, windows of a step, and what a run is made from."""

    steps: tuple[int, int, int, int]
    context: int
    windows: int
    warm_up_queries: int
    """Queries of a window that teach the indexer in its warm-up."""
    seed: int = 0
    save_every: int = 100

    def share(self, ranks: int) -> int:
        """Windows of each rank in a step."""
        if self.windows < 1 or self.windows % ranks:
            raise ValueError(
                f"--windows: expected a multiple of {ranks}, the number of ranks; "
                f"got {self.windows}"
            )
        return self.windows // ranks

    def steps_of(self, stage: str) -> int:
        """Number of steps."""
        return self.steps[STAGES.index(stage)]


def indexer_loss(layer: Attention, seen: Attended, rows: Tensor) -> Tensor:
    """KL of the attention to the softmax of the indexer's scores: dense over every key that `rows`
    see, sparse over the selected keys of all queries."""
    with torch.no_grad():
        some = seen if seen.indices is not None else seen._replace(q=seen.q[rows])
        q, kv = (x.bfloat16() if x.is_cuda else x for x in (layer.absorb(some.q), some.kv))
    q_index, k_index, weights = seen.indexed
    q_index, k_index = q_index.to(q.dtype), k_index.to(q.dtype)
    if seen.indices is not None:
        _, lse = flashdsa.sparse_mla_fwd(q, kv, seen.indices, sm_scale=SM_SCALE)
        kl = flashdsa.indexer_kl_loss(
            q_index, k_index, weights, seen.indices, q=q, kv=kv, lse=lse, sm_scale=SM_SCALE
        )
        return kl.mean()
    ends = (rows + 1).int()
    _, lse = flashdsa.sparse_mla_fwd(q, kv, (torch.zeros_like(ends), ends), sm_scale=SM_SCALE)
    return flashdsa.indexer_kl_loss_dense(
        q_index[rows], k_index, weights[rows], q, kv, lse, ends, sm_scale=SM_SCALE
    )


class Trainer:
    """One stage of a run, on this rank's share of each step's windows."""

    def __init__(
        self, model: ByteModel, text: Tensor, recipe: Recipe, stage: str, folder: Path
    ) -> None:
        """Go on from the stage's own checkpoint, or begin with that of the stage before."""
        self.model, self.text, self.recipe, self.stage = model, text, recipe, stage
        self.path = folder / f"{stage}.safetensors"
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.share = recipe.share(self.ranks)
        for name, parameter in model.named_parameters():
            learns = "indexer" if ".indexer." in name else "rest"
            parameter.requires_grad_(learns in LEARN[stage])
        self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimiser = torch.optim.AdamW(
            self.named.values(), lr=RATES[stage], betas=(0.9, 0.95), weight_decay=0.1
        )
        self.losses: list[tuple[float, float]] = []
        self.seconds = 0.0
        if self.path.exists():
            self._load(self.path)
        elif stage in FOLLOWS:
            load_model(model, folder / f"{FOLLOWS[stage]}.safetensors")

    @property
    def done(self) -> int:
        """Number of steps, those before the checkpoint among them."""
        return len(self.losses)

    def step(self) -> None:
        """Learn from the step's windows; add the losses of language and indexer."""
        began = time.perf_counter()
        recipe, device = self.recipe, self.model.lm_head.weight.device
        first = self.done * recipe.windows + self.rank * self.share
        seed = recipe.seed * len(STAGES) + STAGES.index(self.stage)
        losses = torch.zeros(2, device=device)
        for number, tokens in enumerate(
            windows(self.text, recipe.context, seed, first, self.share), start=first
        ):
            loss = self._losses(tokens.to(device), number) / recipe.windows
            (loss[0] * (self.stage != "warm_up") + loss[1]).backward()
            losses += loss.detach()
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        if self.ranks > 1:
            flat = torch.cat([losses, *(g.flatten() for g in gradients)])
            dist.all_reduce(flat)
            losses, *parts = flat.split([2, *(g.numel() for g in gradients)])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        torch.nn.utils.clip_grad_norm_(self.named.values(), 1.0)
        self._set_rate()
        self.optimiser.step()
        self.optimiser.zero_grad()
        language, divergence = losses.tolist()
        self.losses.append((language, divergence))
        self.seconds += time.perf_counter() - began
        last = self.done == recipe.steps_of(self.stage)
        if self.rank == 0 and (last or self.done % recipe.save_every == 0):
            self._save()

    def _losses(self, tokens: Tensor, number: int) -> Tensor:
        """Losses of a window: language, indexer."""
        sparse, device = self.stage == "sparse", tokens.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits, attended = self.model(tokens[:-1], sparse=sparse)
            language = functional.cross_entropy(logits.float(), tokens[1:])
            divergence = torch.zeros((), device=device)
            if self.stage in ("warm_up", "sparse"):
                generator = torch.Generator().manual_seed(number)
                rows = torch.randperm(self.recipe.context, generator=generator)
                rows = rows[: self.recipe.warm_up_queries].to(device)
                losses = [
                    indexer_loss(layer.self_attn, seen, rows)
                    for layer, seen in zip(self.model.blocks, attended, strict=True)
                ]
                divergence = torch.stack(losses).mean()
        return torch.stack([language, divergence])

    def _set_rate(self) -> None:
        part = self.done / self.recipe.steps_of(self.stage)
        rising = min(1.0, (self.done + 1) / RISING_STEPS)
        share = 0.1 + 0.45 * (1 + math.cos(math.pi * part))
        for group in self.optimiser.param_groups:
            group["lr"] = RATES[self.stage] * rising * share

    def _save(self) -> None:
        tensors = dict(self.model.state_dict())
        for name, parameter in self.named.items():
            for key, value in self.optimiser.state[parameter].items():
                tensors[f"optimiser.{key}.{name}"] = value
        unfinished = self.path.with_suffix(".unfinished")
        found = json.dumps({"losses": self.losses, "seconds": self.seconds})
        save_file(tensors, unfinished, metadata={"found": found})
        unfinished.replace(self.path)

    def _load(self, path: Path) -> None:
        device = self.model.lm_head.weight.device
        load_model(self.model, path)
        with safe_open(path, "pt", device=str(device)) as file:
            for name, parameter in self.named.items():
                self.optimiser.state[parameter] = {
                    key: file.get_tensor(f"optimiser.{key}.{name}")
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
            found = json.loads(file.metadata()["found"])
        self.losses, self.seconds = [tuple(x) for x in found["losses"]], found["seconds"]


def load_model(model: ByteModel, path: Path) -> None:
    """Read the parameters of a checkpoint."""
    with safe_open(path, "pt", device=str(model.lm_head.weight.device)) as file:
        model.load_state_dict({name: file.get_tensor(name) for name in model.state_dict()})


def train(
    trainer: Trainer, on_step: Callable[[int, float, float], None] = lambda *_: None
) -> list[tuple[float, float]]:
    """Run what is left of the stage; return the losses of all its steps."""
    while trainer.done < trainer.recipe.steps_of(trainer.stage):
        trainer.step()
        on_step(trainer.done, *trainer.losses[-1])
    if trainer.ranks > 1:
        dist.barrier()  # the next stage begins with the checkpoint, which rank 0 has written
    return trainer.losses
