"""Text that every machine has: sources and documentation of Python and of installed packages."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SUFFIXES = (".py", ".md", ".rst", ".txt")
FOLDERS = ("/usr/share/doc", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
HELD_OUT_EVERY = 50  # files; the model never trains on these
MOST_BYTES_OF_FILE = 1 << 18  # longer ones are mostly tables


def load_text(most_bytes: int) -> tuple[Tensor, Tensor]:
    """Bytes to train on and held-out bytes, uint8 [n]; `most_bytes` at most, together."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    seen: set[bytes] = set()
    total = 0
    for number, path in enumerate(_files()):
        if total >= most_bytes:
            break
        try:
            content = path.read_bytes()
        except OSError:
            continue
        start = content[:256]
        if start in seen or len(content) > MOST_BYTES_OF_FILE or b"\0" in content:
            continue
        seen.add(start)
        parts[number % HELD_OUT_EVERY == 0].append(content[: most_bytes - total])
        total += len(content)
    train, held_out = (np.frombuffer(b"\n".join(part), np.uint8).copy() for part in parts)
    return torch.from_numpy(train), torch.from_numpy(held_out)


def load_ids(path: Path) -> tuple[Tensor, Tensor]:
    """A tokenizer's ids to train on and held-out ones, [n], from a numpy file that is not read
    whole; documents stand one behind the other."""
    ids = torch.from_numpy(np.load(path, mmap_mode="c"))
    held_out = len(ids) // HELD_OUT_EVERY
    return ids[: len(ids) - held_out], ids[len(ids) - held_out :]


def _files() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


def windows(text: Tensor, length: int, seed: int, first: int, count: int) -> Iterator[Tensor]:
    """Windows number `first` and on of a run, int64 [length + 1]: the same on every machine."""
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        start = int(torch.randint(len(text) - length - 1, (), generator=generator))
        yield text[start : start + length + 1].long()
