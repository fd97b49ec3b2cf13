"""Memory that `compress_kv` writes: the state of each sequence, and a cache of entries."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashdsa.backends.entries import places
from flashdsa.dispatch import checks
from flashdsa.dispatch.overlap import require_addresses_of_its_own, require_apart
from flashdsa.dispatch.transforms import require_batch
from flashdsa.errors import ArgumentValueError
from flashdsa.ops.index_k_cache import CACHE, TOKEN_BYTES, write_index_k_cache
from flashdsa.ops.kv_cache import columns_of, require_cache, write_kv_cache
from flashdsa.problem import INDEX_HEAD_DIM

if TYPE_CHECKING:
    from flashdsa.ops.entries import CompressKvOperands


_INDEX_KEYS = replace(CACHE, name="out", written=True)


def require_state(state: Tensor, operands: CompressKvOperands, least: int) -> None:
    """The state holds the tokens that an entry may want, in memory of its own."""
    checks.require_rank("state", state, (4,), "[B, R, 2, width]")
    if state.shape[1] < least:
        raise ArgumentValueError(f"state: expected R >= {least} rows; got {state.shape[1]}")
    require_batch("compress_kv", "state", state, operands)
    checks.require_writable("state", state)
    require_addresses_of_its_own("state", state)
    names = operands._fields
    require_apart(names, operands, written=[names.index("state")])


def require_cache_of_entries(
    out: Tensor, slots: Tensor, kv_format: str | None, operands: CompressKvOperands, d: int
) -> None:
    """The cache takes entries of d columns; it lies in memory of its own."""
    kv = operands.kv
    checks.require_tensor("slots", slots)
    checks.require_dtype("slots", slots, torch.int32, torch.int64)
    checks.require_shape("slots", slots, kv.shape[:1], "[T], one a token,")
    checks.require_device("slots", slots, kv.device, "kv")
    checks.require_tensor("out", out)
    if _has_index_keys(out):
        if not is_dynamo_compiling():  # which cannot fill a row's cache, and reads the operation's
            _INDEX_KEYS.check(out, kv, "kv", {})
        columns = INDEX_HEAD_DIM
        if kv_format is not None:
            raise ArgumentValueError(
                f"kv_format: expected None, as out has keys of the indexer; got {kv_format!r}"
            )
    else:
        columns = columns_of(*require_cache("out", out, kv_format, kv, "kv"))
    if columns != d:
        raise ArgumentValueError(
            f"out: expected rows of {d} columns, an entry's; got {columns} in shape "
            f"{list(out.shape)}"
        )
    require_apart(("out", "slots", *operands._fields), (out, slots, *operands), written=[0])
    require_batch("compress_kv", "out", out, (slots, *operands))


def _has_index_keys(out: Tensor) -> bool:
    """Whether a cache is one of index keys, by its bytes a key."""
    return out.dim() == 4 and out.shape[-1] in TOKEN_BYTES


def write_entries(
    entries: Tensor,
    offsets: Tensor,
    seen: Tensor | None,
    slots: Tensor,
    ratio: int,
    out: Tensor,
    kv_format: str | None,
    tokens: int,
) -> None:
    """Write each entry into the slot of the token that completes it."""
    if not tokens:
        return
    own = places(offsets, seen, entries.shape[0], ratio)
    last = (own.row + ratio - 1).clamp(0, tokens - 1)
    chosen = torch.where(own.real, slots[last], -1)
    if _has_index_keys(out):
        write_index_k_cache(entries, chosen, out)
    else:
        write_kv_cache(entries, chosen, out, kv_format=kv_format)


def keep_last(state: Tensor, kv: Tensor, gate: Tensor, offsets: Tensor, seen: Tensor) -> None:
    """Put the newest token t of each sequence with ``t mod R == r`` into row r of its state: by
    token, or by row if there are fewer rows."""
    begins, ends = offsets[:-1].long(), offsets[1:].long().contiguous()
    before, rows = seen.long(), state.shape[1]
    if kv.shape[0] > begins.shape[0] * rows:
        newest = (before + ends - begins - 1)[:, None]
        token = newest - (newest - torch.arange(rows, device=state.device)) % rows
        source = (token + (begins - before)[:, None]).clamp(0, kv.shape[0] - 1)
        values = torch.stack((kv[source], gate[source]), dim=2)
        state.copy_(torch.where((token >= before[:, None])[..., None, None], values, state))
        return
    # Rows after the last sequence's repeat its last token's write, older tokens the newest one's.
    row = torch.arange(kv.shape[0], device=state.device).clamp(max=(ends[-1:] - 1).clamp(min=0))
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=begins.shape[0] - 1)
    source = row + (ends[sequence] - 1 - row) // rows * rows
    place = (before[sequence] + row - begins[sequence]) % rows
    source = source.clamp(0, kv.shape[0] - 1)
    state[sequence, place] = torch.stack((kv[source], gate[source]), dim=1)
