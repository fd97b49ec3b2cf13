"""The stages: dense, then the indexer alone against dense attention, then all of it, sparse."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import functional

from examples.dense_to_sparse.checkpoint import load, save
from examples.dense_to_sparse.model import run
from examples.dense_to_sparse.text import windows

STAGES = ("dense", "warm_up", "sparse", "dense_control")
"""In the order in which they run. The control goes on from `dense` as `sparse` does, but stays
dense; with as many steps, losses are compared at equal steps."""
FOLLOWS = {"warm_up": "dense", "sparse": "warm_up", "dense_control": "dense"}
LEARN = {
    "dense": {"rest"}, "warm_up": {"indexer"}, "sparse": {"indexer", "rest"},
    "dense_control": {"rest"},
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Steps of each stage, tokens of a window, windows of a step, and what a run is made from."""

    steps: tuple[int, int, int, int]
    context: int
    windows: int
    warm_up_queries: int
    """Queries of a window that teach the indexer in its warm-up."""
    rates: tuple[float, float, float, float] = (6e-4, 1e-3, 2e-4, 2e-4)
    """Highest rate of each stage; it falls to a tenth."""
    rising_steps: int = 20
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


class Trainer:
    """One stage of a run, on this rank's share of each step's windows."""

    def __init__(self, model: Any, text: Tensor, recipe: Recipe, stage: str, folder: Path) -> None:
        """Go on from the stage's own last steps, which any number of ranks have saved, or begin
        with the result of the stage before."""
        self.model, self.text, self.recipe, self.stage = model, text, recipe, stage
        self.result, self.saved = folder / stage, folder / f"{stage}.steps"
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.share = recipe.share(self.ranks)
        for name, parameter in model.named_parameters():
            learns = "indexer" if ".indexer." in name else "rest"
            parameter.requires_grad_(learns in LEARN[stage])
        self.learning = [p for p in model.parameters() if p.requires_grad]
        self.rate = recipe.rates[STAGES.index(stage)]
        self.optimiser = torch.optim.AdamW(
            self.learning, lr=self.rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.losses: list[tuple[float, float]] = []
        self.seconds = 0.0
        self.norm = 0.0  # of the last step's gradient, before it was clipped
        finished = [int(path.parent.name) for path in self.saved.glob("*/.metadata")]
        if finished:
            self._load(self.saved / str(max(finished)))
        else:
            load(model, folder / FOLLOWS[stage] if stage in FOLLOWS else None, recipe.seed)

    @property
    def done(self) -> int:
        """Number of steps, those before the checkpoint among them."""
        return len(self.losses)

    def step(self) -> None:
        """Learn from the step's windows; add the losses of language and indexer."""
        began = time.perf_counter()
        recipe, device = self.recipe, self.model.device
        first = self.done * recipe.windows + self.rank * self.share
        seed = recipe.seed * len(STAGES) + STAGES.index(self.stage)
        losses = torch.zeros(2, device=device)
        for number, tokens in enumerate(
            windows(self.text, recipe.context, seed, first, self.share), start=first
        ):
            loss = self._losses(tokens.to(device), number) / recipe.windows
            # FSDP means gradients over ranks.
            (self.ranks * (loss[0] * (self.stage != "warm_up") + loss[1])).backward()
            losses += loss.detach()
        if self.ranks > 1:
            dist.all_reduce(losses)
        norm = torch.nn.utils.clip_grad_norm_(self.learning, 1.0)
        self.norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self._set_rate()
        self.optimiser.step()
        self.optimiser.zero_grad()
        language, divergence = losses.tolist()
        self.losses.append((language, divergence))
        self.seconds += time.perf_counter() - began
        last = self.done == recipe.steps_of(self.stage)
        if last:
            save(self.model, self.result)
        if last or self.done % recipe.save_every == 0:
            self._save()

    def _losses(self, tokens: Tensor, number: int) -> Tensor:
        """Losses of a window: language, indexer."""
        sparse, device = self.stage == "sparse", tokens.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            teach = None
            if self.stage in ("warm_up", "sparse"):
                generator = torch.Generator().manual_seed(number)
                rows = torch.randperm(self.recipe.context, generator=generator)
                teach = rows[: self.recipe.warm_up_queries].to(device)
            logits, attended = run(self.model, tokens[:-1], sparse=sparse, teach=teach)
            language = functional.cross_entropy(logits.float(), tokens[1:])
            taught = [x.divergence for x in attended if x.divergence is not None]
            divergence = torch.stack(taught).mean() if taught else torch.zeros_like(language)
        return torch.stack([language, divergence])

    def _set_rate(self) -> None:
        part = self.done / self.recipe.steps_of(self.stage)
        rising = min(1.0, (self.done + 1) / self.recipe.rising_steps)
        share = 0.1 + 0.45 * (1 + math.cos(math.pi * part))
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * rising * share

    def _state(self) -> dict[str, Any]:
        model, optimiser = get_state_dict(self.model, self.optimiser)
        found = json.dumps({"losses": self.losses, "seconds": self.seconds})
        return {"model": model, "optimiser": optimiser, "found": found}

    def _save(self) -> None:
        """Each rank writes its share; older steps go."""
        path = self.saved / str(self.done)
        state_dict_saver.save(self._state(), checkpoint_id=path)
        if self.rank == 0:
            for old in set(self.saved.iterdir()) - {path}:
                shutil.rmtree(old)

    def _load(self, path: Path) -> None:
        state = self._state()
        state_dict_loader.load(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimiser,
            model_state_dict=state["model"], optim_state_dict=state["optimiser"],
        )  # fmt: skip
        found = json.loads(state["found"])
        self.losses, self.seconds = [tuple(x) for x in found["losses"]], found["seconds"]


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
