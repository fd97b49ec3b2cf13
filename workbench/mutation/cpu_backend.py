"""Break the CPU backend in known ways, one at a time; every break must fail a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BACKEND = Path("src/flashdsa/backends/cpu")
TESTS = ["tests/kernels", "tests/ops"]
TESTS += [f"--ignore-glob={names}" for names in ("*emulated*", "*_sm[0-9]*", "*assembled*")]
"""Emulated kernels are judged by float64 and the CPU: they cost minutes and catch nothing more."""


@dataclass(frozen=True)
class Mutation:
    """Replace `old`, which stands exactly once in `file`, by `new`."""

    name: str
    file: str
    old: str
    new: str


MUTATIONS = [
    Mutation(
        "forward: the mask of invalid slots is dropped",
        "sparse_mla.py",
        "s.masked_fill_(~gathered.valid[:, None], -math.inf)",
        "pass",
    ),
    Mutation(
        "forward: lse in base 2",
        "sparse_mla.py",
        "tile_lse = row_max + row_sum.log()",
        "tile_lse = (row_max + row_sum.log()) / math.log(2)",
    ),
    Mutation(
        "backward: of duplicates only one is added",
        "sparse_mla.py",
        "dkv.index_add_(0, row_ids.reshape(-1), dkv_rows.view(-1, d_qk))",
        "dkv[row_ids.reshape(-1).long()] += dkv_rows.view(-1, d_qk)",
    ),
    Mutation(
        "gather: one slot beyond topk_length counts",
        "gather.py",
        "slots < topk_length[:, None]",
        "slots <= topk_length[:, None]",
    ),
    Mutation(
        "top-k: ties go to the largest position",
        "topk.py",
        "(_POSITION_MASK - positions)",
        "positions",
    ),
    Mutation(
        "gather: rows of invalid slots keep what kv holds",
        "gather.py",
        "rows.masked_fill_(~valid[..., None], 0)",
        "rows",
    ),
    Mutation(
        "gather: an index of S_kv is valid",
        "gather.py",
        "(indices < num_rows(kv))",
        "(indices <= num_rows(kv))",
    ),
    Mutation(
        "backward: delta is forgotten",
        "sparse_mla.py",
        "torch.sub(dp, delta[..., None], out=ds)",
        "torch.sub(dp, 0 * delta[..., None], out=ds)",
    ),
    Mutation(
        "backward: the last row of an invalid tile is lost",
        "sparse_mla.py",
        "dkv.index_add_(0, row_ids[valid], dkv_rows[valid])",
        "dkv.index_add_(0, row_ids[valid][:-1], dkv_rows[valid][:-1])",
    ),
    Mutation("indexer: the tail is not written", "indexer.py", "topk_indices.fill_(-1)", "pass"),
    Mutation("top-k: NaN ranks first", "topk.py", "_NAN_KEY = -(2**31)", "_NAN_KEY = 2**31 - 1"),
]


def is_caught(mutation: Mutation) -> bool:
    """Run the tests on a copy of the sources with the mutation in it."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", copy)
        target = copy / BACKEND.relative_to("src") / mutation.file
        text = target.read_text()
        if text.count(mutation.old) != 1:
            sys.exit(f"{mutation.name}: {mutation.old!r} does not stand once in {mutation.file}")
        target.write_text(text.replace(mutation.old, mutation.new))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    failed = [one for one in run.stdout.splitlines() if one.startswith(("FAILED", "SUBFAILED"))]
    print(f"{'caught ' if failed else 'MISSED '} {mutation.name}")
    for line in failed:
        print(f"         by {line.removeprefix('FAILED ').split(' - ')[0]}")
    return bool(failed)


if __name__ == "__main__":
    missed = sum(not is_caught(mutation) for mutation in MUTATIONS)
    print(f"{len(MUTATIONS) - missed} of {len(MUTATIONS)} mutations caught")
    sys.exit(1 if missed else 0)
