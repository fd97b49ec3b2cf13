"""What two ranks learn, for test_two_ranks.py: weights and optimiser are spread by FSDP2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from examples.dense_to_sparse.checkpoint import build, config_of, load
from examples.dense_to_sparse.train import STAGES, Trainer, train
from tests.examples.published import write
from tests.examples.tiny import RECIPE, SAVING, start, text

LATER = STAGES[1:3]
STEPS = 2


def learn_alone(folder: Path) -> None:
    """Leave there what one process learns, its first steps, and a checkpoint of others."""
    write(folder / "v32")
    write(folder / "v3", indexer=False)
    for place in ("alone", "two"):
        (folder / place / "others").mkdir(parents=True)
        (folder / place / "others" / "dense").symlink_to(folder / "v32")
    torch.save(_learn(folder / "alone"), folder / "alone.pt")
    _begin(start(folder / "begun", SAVING))


def learn_on_two_ranks() -> None:
    """As one process does; what it began is taken over, and something begun for it."""
    folder = Path(sys.argv[1])  # see `tests.distributed.ranks`
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = torch.load(folder / "alone.pt")
    found = _learn(folder / "two", mesh)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        _close(found[name], values, name)
    again = start(folder / "begun", SAVING, mesh)
    assert again.done == STEPS
    _close(train(again), expected["dense"][0], "begun by one")
    _begin(start(folder / "handed", SAVING, mesh))


def read_on_two_ranks() -> None:
    """Each reads its rows of every tensor: two experts or one, half of 576 rows in blocks of 128.
    The head of the new indexer leaves one rank without a row."""
    folder = Path(sys.argv[1])
    config = config_of(folder / "v3")
    config.index_n_heads = 1
    whole, spread = (
        build(config, torch.device("cpu"), mesh)
        for mesh in (None, init_device_mesh("cpu", (dist.get_world_size(),)))
    )
    for one in (whole, spread):
        load(one, folder / "v3", seed=3)
    for name, found in spread.state_dict().items():
        is_spread = isinstance(found, DTensor)
        assert is_spread or name.endswith("e_score_correction_bias")
        full = found.full_tensor() if is_spread else found
        assert torch.equal(full, whole.state_dict()[name]), name


def check_what_they_learned(folder: Path) -> None:
    """In one process again: their weights, and the steps that they began."""
    for stage in (*STAGES, *(f"others/{stage}" for stage in LATER)):
        alone, two = (
            load_file(folder / place / stage / "model.safetensors") for place in ("alone", "two")
        )
        assert alone.keys() == two.keys()
        for name, values in alone.items():
            torch.testing.assert_close(two[name], values, rtol=0, atol=1e-6, msg=f"{stage} {name}")
    again = start(folder / "handed", SAVING)
    assert again.done == STEPS
    _close(train(again), torch.load(folder / "alone.pt")["dense"][0], "begun by two")


def _begin(trainer: Trainer) -> None:
    for _ in range(STEPS):
        trainer.step()


def _learn(folder: Path, mesh: DeviceMesh | None = None) -> dict[str, tuple[Any, float]]:
    """Losses of every stage's steps and the last gradient's norm; then from the checkpoint of
    others, whose second layer has experts."""
    made = {}
    for stage in STAGES:
        trainer = start(folder, RECIPE, mesh, stage)
        made[stage] = train(trainer), trainer.norm
    others = folder / "others"
    model = build(config_of(others / "dense"), torch.device("cpu"), mesh)
    for stage in LATER:
        trainer = Trainer(model, text()[0], RECIPE, stage, others)
        made[f"others' {stage}"] = train(trainer), trainer.norm
    return made


def _close(found: Any, expected: Any, what: str) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5, msg=what
        )
