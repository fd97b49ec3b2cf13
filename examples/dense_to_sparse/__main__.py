"""Train a byte model densely, make it sparse as DeepSeek-V3.2 was made, and show what that costs.

    python -m examples.dense_to_sparse --small --out out/small     # a minute on a CPU
    python -m examples.dense_to_sparse --out out/h200              # one Hopper GPU
    torchrun --nproc-per-node 2 -m examples.dense_to_sparse ...    # ranks share windows and weights
    python -m examples.dense_to_sparse --start V3 --tokens t.npy --out out/v3   # others' weights

A run that was stopped goes on from its checkpoints, which transformers reads, too. --only takes
one part: train, look, serve.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from examples.dense_to_sparse import looks
from examples.dense_to_sparse.checkpoint import (
    build,
    config_of,
    in_transformers,
    load,
    round_parameters,
)
from examples.dense_to_sparse.model import Sizes
from examples.dense_to_sparse.serve import FORMS, Server, generate
from examples.dense_to_sparse.text import load_ids, load_text
from examples.dense_to_sparse.train import STAGES, Recipe, Trainer, train

Text = tuple[Tensor, Tensor]
SMALL = (
    Sizes(hidden=64, layers=2, heads=2, q_rank=64, intermediate=128, topk=64),
    Recipe(
        (80, 40, 10, 10),
        context=256,
        windows=2,
        warm_up_queries=32,
        rates=(3e-3, 3e-3, 1e-3, 1e-3),
        rising_steps=5,
    ),
)
LARGE = Sizes(), Recipe((1200, 100, 400, 400), context=8192, windows=4, warm_up_queries=512)


def run_train(model: Any, text: Text, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Run every stage that is not done; the losses of its steps, and its seconds."""
    found = {}
    with Progress(disable=dist.is_initialized() and dist.get_rank() > 0) as bar:
        for stage in STAGES:
            if (folder / stage).is_symlink() or not recipe.steps_of(stage):
                found[stage] = {"losses": [], "seconds": 0.0}  # weights of others, or left out
                continue
            trainer = Trainer(model, text[0], recipe, stage, folder)
            task = bar.add_task(stage, total=recipe.steps_of(stage), completed=trainer.done)

            def show(done: int, language: float, divergence: float, task: Any = task) -> None:
                said = f"{language:.3f} nats a token, indexer {divergence:.3f}"
                bar.update(task, completed=done, description=said)

            train(trainer, show)
            found[stage] = {"losses": trainer.losses, "seconds": trainer.seconds}
    return found


def run_look(model: Any, text: Text, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Losses, recall, selection of each stage's checkpoint; speed of training."""
    on_gpu, context = model.device.type == "cuda", recipe.context
    count = 16 if on_gpu else 2
    found: dict[str, Any] = {"stages": {}}
    for stage in STAGES:
        if not (folder / stage).exists():
            continue  # it had no steps, or is still to run
        load(model, folder / stage)
        forms = [False] if stage.startswith("dense") else [False, True]
        found["stages"][stage] = {
            ("sparse" if sparse else "dense"): {
                "loss": looks.held_out_loss(model, text[1], context, count, sparse)
            }
            for sparse in forms
        }
        if stage == "sparse":
            theirs = in_transformers(model)
            found["in_transformers"] = {
                "theirs": looks.loss_in_transformers(theirs, text[1], context, 4),
                "ours": looks.held_out_loss(model, text[1], context, 4, sparse=True),
            }
        chosen = looks.selection(model, text[1], context, 64)
        torch.save(chosen.pop("lists"), folder / f"{stage}-lists.pt")
        found["stages"][stage]["selection"] = chosen
    lengths = (8192, 32768, 131072) if on_gpu else (256,)
    found["speed"] = {n: looks.training_speed(model, n, 3) for n in lengths}
    return found


def run_serve(model: Any, text: Text, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Milliseconds of a step of decoding in each form, and whether a user's tokens depend on the
    other users."""
    load(model, folder / "sparse")
    on_gpu, rows = model.device.type == "cuda", []
    if on_gpu:
        round_parameters(model)
    lengths, users = (
        ((8192, 32768, 131072), (1, 4, 16, 64)) if on_gpu else ((recipe.context,), (1, 3))
    )
    for context in lengths:
        prompt = text[1][:context].long()
        for count in users:
            row: dict[str, Any] = {"context": context, "users": count}
            for form in FORMS:
                try:
                    row[f"{form}_ms"] = (
                        1e3 * generate(Server(model, prompt, count, 128, form), 64)[1]
                    )
                except torch.OutOfMemoryError:
                    row[f"{form}_ms"] = None
            rows.append(row)
    prompt = text[1][: lengths[0]].long()
    said = [
        generate(Server(model, prompt, n, 128, "sparse", batch_invariant=True), 64)[0][0]
        for n in users
    ]
    equal = [bool(torch.equal(said[0], other)) for other in said[1:]]
    return {"rows": rows, "tokens": said[0].tolist(), "equal": equal}


def summary(found: dict[str, dict[str, Any]], folder: Path) -> str:
    """One line about what the parts of a run made."""
    said = []
    if "train" in found:
        said.append("checkpoints " + ", ".join(STAGES))
    if "look" in found:
        looked = []
        for stage, x in found["look"]["stages"].items():
            loss, recall = x.get("sparse", x["dense"])["loss"], min(x["selection"]["recall"])
            looked.append(f"{stage} {loss:.3f}, {recall:.0%}")
        what = f"nats a token, and recall of the worst indexer ({looks.RECALL:.0%} passes)"
        said.append(f"held-out {what}: {'; '.join(looked)}")
    said.append("results in " + ", ".join(f"{part}.json" for part in found))
    return f"{folder}: {'; '.join(said)}"


PARTS = {"train": run_train, "look": run_look, "serve": run_serve}


def main() -> None:
    """Read the command line and run the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and results")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU takes a minute for")
    parser.add_argument("--only", choices=PARTS, help="one part of the run")
    parser.add_argument("--steps", type=int, nargs=4, metavar="N", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--windows", type=int, help="of a step: a multiple of the ranks")
    parser.add_argument("--rates", type=float, nargs=4, metavar="R", help="highest, of the stages")
    parser.add_argument("--rising-steps", type=int, help="in which a rate rises (default 20)")
    parser.add_argument("--context", type=int, help="tokens of a window")
    parser.add_argument("--start", type=Path, help="dense checkpoint in DeepSeek's layout")
    parser.add_argument("--tokens", type=Path, help="numpy file of ids, the last 2%% held out")
    parser.add_argument("--bytes", type=int, help="most text (default 256 MiB, small 4 MiB)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # checkpoints of one
    sizes, recipe = SMALL if options.small else LARGE
    if options.small:
        torch.set_num_threads(1)  # threads wait for one another at such sizes
    options.bytes = options.bytes or (1 << 22 if options.small else 1 << 28)
    given = {
        field.name: tuple(value) if isinstance(value, list) else value
        for field in fields(recipe)
        if (value := getattr(options, field.name, None)) is not None
    }
    recipe = replace(recipe, **given)  # type: ignore[arg-type]
    try:
        recipe.share(int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        parser.error(str(error))
    dense = options.out / "dense"
    if options.start and not (options.start / "config.json").exists():
        parser.error(f"--start: expected a folder with config.json; got {options.start}")
    if options.start and dense.exists() and dense.resolve() != options.start.resolve():
        parser.error(f"--out: {dense} is another checkpoint than --start")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh, rank = None, 0
    if "RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
        rank = dist.get_rank()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    options.out.mkdir(parents=True, exist_ok=True)
    if options.start and rank == 0 and not dense.exists():
        dense.symlink_to(options.start.resolve())
    if mesh is not None:
        dist.barrier()
    config = config_of(dense) if dense.is_symlink() else sizes.config(recipe.context)
    text = load_ids(options.tokens) if options.tokens else load_text(options.bytes)
    made = {}
    for part in [options.only] if options.only else PARTS:
        if rank and part != "train":
            continue  # one rank looks and serves
        torch.manual_seed(recipe.seed)
        model = build(config, device, mesh if part == "train" else None)
        made[part] = found = PARTS[part](model, text, recipe, options.out)
        if rank == 0:
            found["run"] = {
                "device": name, "recipe": asdict(recipe),
                "model": json.loads(config.to_json_string()),
            }  # fmt: skip
            (options.out / f"{part}.json").write_text(json.dumps(found, indent=1))
    if rank == 0:
        print(summary(made, options.out))


if __name__ == "__main__":
    main()
