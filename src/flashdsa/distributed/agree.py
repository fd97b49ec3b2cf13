"""Ranks agree on a call before its first collective, or all of them raise.

Collectives whose ranks differ in sizes do not fail: they hang, corrupt memory or end the process.
So every rank first sends 16 bytes: a hash of what the call is, and whether it found its own
arguments wrong. Where these differ, descriptions of a fixed size follow, and each rank raises the
same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flashdsa.distributed.collectives import all_gather
from flashdsa.distributed.group import Group, device_of_group, serves
from flashdsa.errors import ArgumentValueError, FlashDsaError
from flashdsa.settings import Settings

DESCRIPTION_BYTES = 2048
ERROR_KEY = "error"
_agreed: set[tuple[str, str]] = set()
"""(group, description) of calls that need no exchange again."""


def agree(
    group: dist.ProcessGroup,
    like: object,
    description: Mapping[str, str],
    error: FlashDsaError | None = None,
    *,
    once: bool = False,
) -> None:
    """Return where every rank of `group` calls with the same `description` and no error.

    The exchange runs on the CPU where the group has a backend for it, in every call; no GPU waits.
    Otherwise (NCCL alone) it makes the host wait for the GPU, and is made once for a description;
    with FLASHDSA_CHECK=1 in every call.

    Args:
        like: a tensor of the call, whose device says where the exchange may run (if it is none,
            the argument is wrong, and `error` says so).
        description: what must be the same on all ranks, by names that the error message uses.
        error: what this rank found wrong with its own arguments.
        once: once for a description on the CPU too, for calls of microseconds.

    Raises:
        FlashDsaError: this rank's own `error`.
        ArgumentValueError: another rank's error, or what differs, with ranks and values.
    """
    if group.size() == 1 or isinstance(like, FakeTensor):
        if error is not None:
            raise error
        return
    text = json.dumps(description, sort_keys=True)
    device = like.device if isinstance(like, Tensor) else device_of_group(group)
    on_cpu = device.type == "cpu" or serves(group, "cpu")
    key = (group.group_name, text)
    again = on_cpu and not once
    if not again and error is None and key in _agreed and not Settings.from_environment().check:
        return
    if not on_cpu and torch.cuda.is_current_stream_capturing():
        raise ArgumentValueError(
            "context parallelism: these shapes or options are new, and a CUDA graph is being "
            "captured; make one call with them before the capture"
        )
    channel = _Channel(group, torch.device("cpu") if on_cpu else device)
    headers = channel.exchange(torch.tensor([_hash(text), error is not None], dtype=torch.int64))
    if (headers == headers[0]).all() and error is None:
        _agreed.add(key)
        return
    if error is not None:
        text = json.dumps({ERROR_KEY: str(error)})
    descriptions = [_unpacked(row) for row in channel.exchange(_packed(text))]
    if error is not None:
        raise error
    raise ArgumentValueError(_disagreement(descriptions))


class _Channel:
    """Exchanges small host tensors of a fixed size over a group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = Group(group.group_name, group.size(), group.rank())
        self._device = device

    def exchange(self, mine: Tensor) -> Tensor:
        """mine [n] -> [ranks, n], on the host."""
        return all_gather(mine.to(self._device)[None], self._group).cpu()


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _packed(text: str) -> Tensor:
    """uint8 [DESCRIPTION_BYTES]: what is longer is cut off, what is shorter ends in zeros."""
    encoded = text.encode()[:DESCRIPTION_BYTES]
    return torch.frombuffer(bytearray(encoded.ljust(DESCRIPTION_BYTES, b"\0")), dtype=torch.uint8)


def _unpacked(row: Tensor) -> dict[str, str]:
    text = bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore")
    try:
        found: dict[str, str] = json.loads(text)
    except json.JSONDecodeError:  # cut off
        found = {ERROR_KEY: text}
    return found


def _disagreement(descriptions: list[dict[str, str]]) -> str:
    """One line: the ranks whose arguments are wrong, or what differs, each value with its ranks."""
    wrong = [
        f"rank {rank}: {found[ERROR_KEY]}"
        for rank, found in enumerate(descriptions)
        if ERROR_KEY in found
    ]
    if wrong:
        return f"context parallelism: wrong arguments on another rank: {'; '.join(wrong)}"
    names = dict.fromkeys(name for found in descriptions for name in found)
    lines = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, found in enumerate(descriptions):
            ranks_of.setdefault(found.get(name, "nothing"), []).append(rank)
        if len(ranks_of) > 1:
            values = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
            lines.append(f"{name}: {values}")
    return f"context parallelism: ranks must agree, but differ in {'; '.join(lines)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
