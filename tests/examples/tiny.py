"""The recipe from dense to sparse in a form that takes a second, and what two ranks learn of it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from examples.dense_to_sparse.model import ByteModel, Sizes
from examples.dense_to_sparse.train import Recipe, Trainer, train

SIZES = Sizes(hidden=32, layers=1, heads=2, q_rank=32, intermediate=32, topk=32)
RECIPE = Recipe((3, 2, 3, 4), context=96, windows=2, warm_up_queries=16)


def text() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(32, 127, (2, 4000), generator=generator, dtype=torch.uint8)
    return drawn[0], drawn[1]


def model() -> ByteModel:
    torch.manual_seed(0)
    return ByteModel(SIZES)


def learn_alone(folder: Path) -> None:
    """Leave the losses there, for two ranks."""
    (folder / "two").mkdir()
    found = train(Trainer(model(), text()[0], RECIPE, "dense", folder))
    torch.save(found, folder / "alone.pt")


def learn_on_two_ranks() -> None:
    folder = Path(sys.argv[1])  # see `tests.distributed.ranks`
    found = train(Trainer(model(), text()[0], RECIPE, "dense", folder / "two"))
    alone = torch.tensor(torch.load(folder / "alone.pt"))
    torch.testing.assert_close(torch.tensor(found), alone, rtol=1e-4, atol=1e-5)
