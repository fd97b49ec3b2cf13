"""The recipe from dense to sparse in a form that takes a second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from examples.dense_to_sparse.checkpoint import build
from examples.dense_to_sparse.model import Sizes
from examples.dense_to_sparse.train import Recipe, Trainer

SIZES = Sizes(hidden=32, layers=1, heads=2, q_rank=32, intermediate=32, topk=32)
RECIPE = Recipe((3, 2, 3, 4), context=96, windows=2, warm_up_queries=16)
SAVING = replace(RECIPE, save_every=2)


def text() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(32, 127, (2, 4000), generator=generator, dtype=torch.uint8)
    return drawn[0], drawn[1]


def model(mesh: DeviceMesh | None = None) -> Any:
    return build(SIZES.config(RECIPE.context), torch.device("cpu"), mesh)


def start(
    folder: Path, recipe: Recipe = RECIPE, mesh: DeviceMesh | None = None, stage: str = "dense"
) -> Trainer:
    return Trainer(model(mesh), text()[0], recipe, stage, folder)
