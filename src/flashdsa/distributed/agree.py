"""Ranks agree on a call before its first collective, or all of them raise.

Collectives whose ranks differ in sizes do not fail: they hang, corrupt memory or end the process.
So every rank first sends 16 bytes: a hash of what the call is, and whether it failed here. If
these differ, descriptions of a fixed size follow, and each rank raises.

INVARIANT: every rank sends in every call. Nothing that a rank has seen before lets it leave out an
exchange that another one waits for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor

from flashdsa.dispatch.autograd import refuse_tangents
from flashdsa.dispatch.transforms import refuse_transforms
from flashdsa.distributed.collectives import CPU, exchange, ranks_text
from flashdsa.distributed.group import Group, describe
from flashdsa.errors import ArgumentValueError, FlashDsaError, RankError

DESCRIPTION_BYTES = 2048
ERROR_KEY = "error"


@contextmanager
def agreement(group: Group, like: object, **names: str) -> Iterator[dict[str, str]]:
    """Everything of a call that may fail on one rank alone runs inside; at its end ranks `agree`.

    Yields the description, to be filled. An error of the block, of whatever kind, is told to the
    other ranks, and raised.

    Args:
        like: as for `agree`.
        names: what it calls the arguments of operations that run inside: ``kv="kv_local"``.
    """
    description = {"operation": group.call}
    error: Exception | None = None
    try:
        if group.size > 1:
            refuse_transforms(group.call)
        yield description
        refuse_tangents(group.call, [like])
    except FlashDsaError as found:
        name, colon, rest = str(found).partition(":")
        error = type(found)(names[name] + colon + rest) if name in names else found
    except Exception as found:
        error = found
    agree(group.processes, like, description, error)


def agree(
    group: dist.ProcessGroup,
    like: object,
    description: Mapping[str, str],
    error: Exception | None = None,
) -> None:
    """Return where every rank of `group` calls with the same `description` and no error.

    The exchange runs on the CPU: no GPU waits, and a CUDA graph may be captured meanwhile.

    Args:
        like: a tensor of the call: ranks that compute with fake ones exchange nothing.
        description: what must be the same on all ranks, by names that the error message uses.
        error: what failed on this rank: it is wrong arguments, as a rule.

    Raises:
        Exception: this rank's own `error`.
        ArgumentValueError: another rank's error, or what differs, with ranks and values.
        RankError: another rank died, or did not come in the group's timeout.
    """
    if group.size() == 1 or isinstance(like, FakeTensor):
        if error is not None:
            raise error
        return
    try:
        with temporarily_clear_interpreter_stack():  # no transform of an error
            disagreement = _compare(group, description, error)
    except RankError as lost:
        raise error or lost from (None if error else lost.__cause__)
    if error is not None:
        raise error
    if disagreement:
        raise ArgumentValueError(f"context parallelism: {disagreement}")


def _compare(
    group: dist.ProcessGroup, description: Mapping[str, str], error: Exception | None
) -> str:
    """Return what another rank found wrong, or what differs; "" if all ranks agree."""
    text, call = json.dumps(description, sort_keys=True), description.get("operation", "flashdsa")
    header = torch.tensor([_hash(text), error is not None], dtype=torch.int64, device=CPU)
    headers = exchange(header, group, call)
    if error is None and bool((headers == headers[0]).all()):
        return ""
    if error is not None:
        text = json.dumps({ERROR_KEY: _told(error)})
    return _disagreement([_unpacked(row) for row in exchange(_packed(text), group, call)])


def _told(error: Exception) -> str:
    """Return the text of the error for the other ranks."""
    kind = "" if isinstance(error, FlashDsaError) else f"{type(error).__name__}: "
    return kind + str(error)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _packed(text: str) -> Tensor:
    """uint8 [DESCRIPTION_BYTES]: what is longer is cut off, what is shorter ends in zeros."""
    encoded = text.encode()[:DESCRIPTION_BYTES]
    padded = encoded.ljust(DESCRIPTION_BYTES, b"\0")
    return torch.tensor(list(padded), dtype=torch.uint8, device=CPU)


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
        return f"wrong arguments on another rank: {'; '.join(wrong)}"
    names = dict.fromkeys(name for found in descriptions for name in found)
    lines = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, found in enumerate(descriptions):
            ranks_of.setdefault(found.get(name, "nothing"), []).append(rank)
        if len(ranks_of) > 1:
            values = ", ".join(
                f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_of.items()
            )
            lines.append(f"{name}: {values}")
    return f"ranks must agree, but differ in {'; '.join(lines)}"


@torch.library.custom_op("flashdsa::agree", mutates_args=())
def _agree(
    x: Tensor, others: Sequence[Tensor], names: str, options: str, group: str, call: str
) -> Tensor:
    """A copy of `x`, once every rank of `group` has come with tensors and options that fit."""
    name, *rest = names.split(",")
    facts = {"operation": call, "options": options, name: describe(x)}
    facts |= {
        other: describe(value, of_each_row=True) for other, value in zip(rest, others, strict=True)
    }
    agree(Group(group, 0, 0, call).processes, x, facts)
    return x.clone()


@_agree.register_fake
def _(
    x: Tensor, others: Sequence[Tensor], names: str, options: str, group: str, call: str
) -> Tensor:
    return torch.empty_like(x)


def agreed(
    x: Tensor, others: Mapping[str, Tensor], name: str, options: str, group: Group
) -> Tensor:
    """`x` as it may be sent.

    Compiled code gets it from the comparison, so that nothing is sent before that; otherwise it is
    `x` itself: `agree` was called before.

    Args:
        x: the tensor that is sent, which messages call `name`.
        others: tensors whose rows may differ in number, by name.
        options: everything else that must be the same on all ranks.
    """
    if group.size == 1 or not torch.compiler.is_compiling():
        return x
    names = ",".join([name, *others])
    checked: Tensor = _agree(x, list(others.values()), names, options, group.name, group.call)
    return checked
