"""Train a byte model densely, make it sparse as DeepSeek-V3.2 was made, and show what that costs.

    python -m examples.dense_to_sparse --small --out out/small     # minutes on a CPU
    python -m examples.dense_to_sparse --out out/h200              # one Hopper GPU
    torchrun --nproc-per-node 2 -m examples.dense_to_sparse ...    # ranks share each step's windows

A run that was stopped goes on from its checkpoints, which transformers reads, too. --only takes
one part: train, look, serve.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor

from examples.dense_to_sparse import looks
from examples.dense_to_sparse.model import ByteModel, Sizes, in_transformers
from examples.dense_to_sparse.serve import FORMS, Server, generate
from examples.dense_to_sparse.text import load_text
from examples.dense_to_sparse.train import STAGES, Recipe, Trainer, load_model, train

Text = tuple[Tensor, Tensor]
SMALL = (
    Sizes(hidden=64, layers=2, heads=2, q_rank=64, intermediate=128, topk=64),
    Recipe((12, 8, 8, 16), context=256, windows=2, warm_up_queries=32),
)
LARGE = Sizes(), Recipe((1200, 100, 400, 400), context=8192, windows=4, warm_up_queries=512)


def run_train(model: ByteModel, text: Text, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Run every stage that is not done; the losses of its steps, and its seconds."""
    found = {}
    with Progress() as bar:
        for stage in STAGES:
            trainer = Trainer(model, text[0], recipe, stage, folder)
            task = bar.add_task(stage, total=recipe.steps_of(stage), completed=trainer.done)

            def show(done: int, language: float, divergence: float, task: Any = task) -> None:
                said = f"{language:.3f} nats a byte, indexer {divergence:.3f}"
                bar.update(task, completed=done, description=said)

            train(trainer, show)
            found[stage] = {"losses": trainer.losses, "seconds": trainer.seconds}
    return found


def run_look(model: ByteModel, text: Text, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Losses, recall, selection of each stage's checkpoint; speed of training."""
    on_gpu, context = model.lm_head.weight.is_cuda, recipe.context
    count = 16 if on_gpu else 2
    found: dict[str, Any] = {"stages": {}}
    for stage in STAGES:
        load_model(model, folder / f"{stage}.safetensors")
        forms = [False] if stage.startswith("dense") else [False, True]
        found["stages"][stage] = {
            ("sparse" if sparse else "dense"): {
                "loss": looks.held_out_loss(model, text[1], context, count, sparse),
                "recall": {
                    d: looks.needle_recall(model, text[1], context, d, count, sparse)
                    for d in (context // 32, context // 8, context // 2, context - 64)
                    if d >= looks.NEEDLE
                },
            }
            for sparse in forms
        }
        if stage == "sparse":
            theirs = in_transformers(model, model.sizes, context)
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


def run_serve(model: ByteModel, text: Text, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Milliseconds of a step of decoding in each form, and whether a user's bytes depend on the
    other users."""
    load_model(model, folder / "sparse.safetensors")
    on_gpu, rows = model.lm_head.weight.is_cuda, []
    if on_gpu:
        model.bfloat16()
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
    return {"rows": rows, "bytes": bytes(said[0].tolist()).decode(errors="replace"), "equal": equal}


def summary(found: dict[str, dict[str, Any]], folder: Path) -> str:
    """One line about what the parts of a run made."""
    said = []
    if "train" in found:
        said.append("checkpoints " + ", ".join(f"{stage}.safetensors" for stage in STAGES))
    if "look" in found:
        losses = found["look"]["stages"]["sparse"]
        sparse, dense = losses["sparse"]["loss"], losses["dense"]["loss"]
        said.append(
            f"the sparse one reads held-out text at {sparse:.3f} nats a byte, "
            f"{dense:.3f} with dense attention"
        )
    said.append("results in " + ", ".join(f"{part}.json" for part in found))
    return f"{folder}: {'; '.join(said)}"


PARTS = {"train": run_train, "look": run_look, "serve": run_serve}


def main() -> None:
    """Read the command line and run the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and results")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU takes minutes for")
    parser.add_argument("--only", choices=PARTS, help="one part of the run")
    parser.add_argument("--steps", type=int, nargs=4, metavar="N", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--windows", type=int, help="of a step: a multiple of the ranks")
    parser.add_argument("--bytes", type=int, default=1 << 28, help="most text (default 256 MiB)")
    options = parser.parse_args()
    sizes, recipe = SMALL if options.small else LARGE
    if options.steps:
        recipe = replace(recipe, steps=tuple(options.steps))
    if options.windows is not None:
        recipe = replace(recipe, windows=options.windows)
    try:
        recipe.share(int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        parser.error(str(error))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            torch.cuda.set_device(dist.get_rank())
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    options.out.mkdir(parents=True, exist_ok=True)
    text = load_text(options.bytes if not options.small else 1 << 22)
    rank = dist.get_rank() if dist.is_initialized() else 0
    made = {}
    for part in [options.only] if options.only else PARTS:
        if rank and part != "train":
            continue  # one rank looks and serves
        torch.manual_seed(recipe.seed)
        model = ByteModel(sizes).to(device)
        made[part] = found = PARTS[part](model, text, recipe, options.out)
        if rank == 0:
            found["run"] = {"device": name, "sizes": asdict(sizes), "recipe": asdict(recipe)}
            (options.out / f"{part}.json").write_text(json.dumps(found, indent=1))
    if rank == 0:
        print(summary(made, options.out))


if __name__ == "__main__":
    main()
