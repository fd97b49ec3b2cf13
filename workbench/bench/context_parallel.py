"""Context parallelism on the GPUs of one host: collectives, exactness, indexer, attention, overlap.

    torchrun --nproc-per-node 4 -m workbench.bench.context_parallel --out result.json
    torchrun --nproc-per-node 2 -m workbench.bench.context_parallel --dry-run --out dry.json

Without GPUs, or with --dry-run, everything runs on gloo with tiny sizes: that tests this program
and measures nothing. Rank 0 prints each number when it has it, and writes the JSON then.
"""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

# NVLink multicast stays off: it is not to be had on every host.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flashdsa.bench.checkout import find_checkout
from flashdsa.bench.machine import versions
from flashdsa.errors import FlashDsaError
from workbench.bench import context_parallel_parts

SCHEMA = "flashdsa-context-parallel/1"

PARTS = {
    "collectives": context_parallel_parts.collectives,
    "errors": context_parallel_parts.errors_of_sums,
    "exactness": context_parallel_parts.exactness,
    "attention": context_parallel_parts.attention,
    "indexer": context_parallel_parts.indexer,
    "overlap": context_parallel_parts.overlap,
}


def main() -> None:
    """Parse, connect, run the parts in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("context_parallel.json"))
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dry-run", action="store_true", help="gloo, CPU tensors, tiny sizes")
    chosen = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not chosen.dry_run
    if not on_gpu:
        chosen.seq_len, chosen.heads, chosen.topk, chosen.repeats = 512, 4, 64, 2
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    run = context_parallel_parts.Run(
        mesh, device, chosen.seq_len, chosen.heads, chosen.topk, chosen.repeats, chosen.out
    )
    checkout = find_checkout()
    run.found = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": None if checkout is None else checkout.as_dict(),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU (a dry run measures nothing)",
        "ranks": run.size,
        "versions": versions() | {"nccl": torch.cuda.nccl.version() if on_gpu else None},
        "sizes": {"seq_len": run.seq_len, "heads": run.heads, "topk": run.topk},
    }
    for part in chosen.parts:
        try:
            PARTS[part](run)
        except (FlashDsaError, torch.OutOfMemoryError) as error:
            run.say(part, "failed", str(error))
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
