"""Values that the CPU refuses: a call with each, and the calls that the promise says it equals.

The promise is "Values" in docs/concepts/dsa.md. What it says of a value is a call with another one
in its place, or what is made of the results of that call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flashdsa
from flashdsa import distributed
from flashdsa.problem import INT32_MAX
from flashdsa.verify.entries_cases import EntriesCase, make_entries_inputs
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs
from flashdsa.verify.prefill_cases import PrefillCase, make_prefill_inputs

Call = Callable[[str, int, int], Sequence[Tensor]]
"""What a call of a backend returns or writes. Its second argument is 0 for the call with the
refused value, 1 for the call that it should equal, and more where either result will do; its third
is the seed of all other values."""
OTHERS = ("torch",)
TRITON = ("torch", "emulate-triton")
HOPPER = ("torch", "emulate-sm90")
EACH = ("torch", "emulate-triton", "emulate-sm90")
POISON = 0x7F7F7F7F


@dataclass(frozen=True)
class Refused:
    """A value that is refused where values are read.

    Attributes:
        message: what the error says, a pattern.
        backends: that are tried; one of an operation that has no backends.
        choices: results that each number of the outputs may have.
    """

    name: str
    message: str
    call: Call
    backends: tuple[str, ...] = OTHERS
    choices: int = 1


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _writes_kv(kv_format: str | None, *slots: list[int]) -> Call:
    """Of a cache of 128 slots, written with each list of slots."""

    def call(_: str, choice: int, seed: int) -> Sequence[Tensor]:
        width = {None: 512, "v32": 656, "v4": 584}[kv_format]
        cache = torch.randint(100, (2, 64, 1, width), generator=_random(seed))
        cache = cache.to(torch.bfloat16 if kv_format is None else torch.uint8)
        rows = torch.randn(4, 576 if kv_format == "v32" else 512, generator=_random(seed))
        flashdsa.write_kv_cache(rows, torch.tensor(slots[choice]), cache, kv_format=kv_format)
        return [cache.view(torch.uint8)]

    return call


def _writes_index_keys(token_bytes: int, *slots: list[int]) -> Call:
    def call(backend: str, choice: int, seed: int) -> Sequence[Tensor]:
        cache = torch.randint(100, (2, 64, 1, token_bytes), generator=_random(seed)).byte()
        k = torch.randn(4, 128, generator=_random(seed)).bfloat16()
        flashdsa.write_index_k_cache(k, torch.tensor(slots[choice]), cache, backend=backend)
        return [cache]

    return call


OUTSIDE = [3, 999, -7, 128], [3, -1, -1, -1]
TWICE = [3, 5, 3, 7], [3, 5, -1, 7], [-1, 5, 3, 7]


def _reads(of_index_keys: bool) -> Call:
    """Slots outside read as 0."""

    def call(backend: str, choice: int, seed: int) -> Sequence[Tensor]:
        slots = torch.tensor([3, 128, -7, 5] if choice == 0 else [3, 0, 0, 5])
        bytes_ = torch.randint(100, (2, 64, 1, 132 if of_index_keys else 656),
                               generator=_random(seed)).byte()  # fmt: skip
        if of_index_keys:
            read = flashdsa.read_index_k_cache(bytes_, slots, backend=backend)
            found = [x.view(torch.uint8).clone() for x in read]
        else:
            found = [flashdsa.read_kv_cache(bytes_, slots)]
        if choice:
            for x in found:
                x.unflatten(0, (4, -1))[1:3] = 0
        return found

    return call


LENGTHS = (200, 70, 130)


def _of_pages(
    lengths: Sequence[int], page: int | None = None, max_len: int = 210, meant: int = 210
) -> Call:
    """Scores and choice of both, of rows whose table has 6 pages.

    Args:
        lengths: refused ones; None: none.
        page: refused, in the place of row 0's second one.
        max_len, meant: of the scores; those beyond are cut off.
    """

    def call(backend: str, choice: int, seed: int) -> Sequence[Tensor]:
        x = make_indexer_inputs(IndexerCase("", LENGTHS, 512, num_heads=16, positions=True), seed)
        q, cache, weights, _, table = x.operands
        table = (table % len(cache)).clone()
        width = table.shape[1] * 64
        own = list(lengths) if choice == 0 else [min(max(n, 0), width) for n in lengths]
        seq_lens = torch.tensor(own, dtype=torch.int32)
        if page is not None and choice == 0:
            table[0, 1] = page
        rows = q, cache, weights, seq_lens, table
        size = max_len if choice == 0 else meant
        scores = flashdsa.indexer_logits(*rows, size, backend=backend)[:, :max_len]
        ids = torch.full((len(q), 512), POISON, dtype=torch.int32)
        if max_len == meant:
            flashdsa.dsa_topk_indexer(*rows, ids, ids="position", backend=backend)
        ids = ids.sort(dim=1, descending=True).values
        if page is not None and choice == 1:  # whose tokens are not chosen
            scores[0, 64:128] = -torch.inf
            ids[0] = ids[0].masked_fill((ids[0] >= 64) & (ids[0] < 128), -1)
            ids = ids.sort(dim=1, descending=True).values
        return [scores, ids]

    return call


def _topk_indices(backend: str, choice: int, seed: int) -> Sequence[Tensor]:
    scores = torch.randn(3, 300, generator=_random(seed))
    lengths = ([-3, 301, INT32_MAX], [0, 300, 300])[choice]
    given = torch.tensor(lengths, dtype=torch.int32)
    return [flashdsa.topk_indices(scores, given, 20, sorted=True, backend=backend)]


def _ranges(starts: Sequence[list[int]], ends: Sequence[list[int]]) -> Call:
    """Scores and choice of 4 queries over 64 keys."""

    def call(backend: str, choice: int, seed: int) -> Sequence[Tensor]:
        case = PrefillCase("", ((0, 55),) * 4, 512, num_heads=16, sorted=True)
        x = make_prefill_inputs(case, seed)
        keys = x.k_index.float().nan_to_num().clamp(-400, 400).to(x.k_index.dtype)
        scales = torch.rand(64, generator=_random(seed))
        given = (torch.tensor(one[choice], dtype=torch.int32) for one in (starts, ends))
        rows = x.q_index, keys, x.weights, *given
        scores = flashdsa.prefill_logits(*rows, k_scale=scales, backend=backend)
        ids = torch.full((4, 512), POISON, dtype=torch.int32)
        flashdsa.dsa_topk_prefill(*rows, ids, k_scale=scales, sorted=True, backend=backend)
        return [scores, ids]

    return call


def _causal(*offsets: tuple[list[int], list[int] | None, int], cut: int | None = None) -> Call:
    """Ranges of these (queries', keys', number of queries); of the second ones the first `cut`."""

    def call(_: str, choice: int, seed: int) -> Sequence[Tensor]:
        q, k, queries = offsets[choice]
        keys = None if k is None else torch.tensor(k)
        found = flashdsa.causal_ranges(torch.tensor(q), keys, num_queries=queries)
        return [x[:cut] for x in found]

    return call


def _before_the_first(_: str, choice: int, seed: int) -> Sequence[Tensor]:
    """Two queries more, which see nothing."""
    found = flashdsa.causal_ranges(torch.tensor(([2, 5, 8], [0, 3, 6])[choice]))
    return found if choice == 0 else [torch.cat((x.new_zeros(2), x)) for x in found]


POOLS = EntriesCase("", (40,), 4, 128, norm=False, rotated=0)
CSA_KEYS = EntriesCase("", (40,), 4, 128, overlap=True)


def _entries(*offsets: list[int], case: EntriesCase = POOLS, begin: int = 0, rows: int = 0) -> Call:
    """Entries and gradients; of the second offsets those of rows from `begin` on. `rows`: of the
    rotation's tables; the second ones repeat the last row."""

    def call(backend: str, choice: int, seed: int) -> Sequence[Tensor]:
        x = make_entries_inputs(case, seed)
        options = x.options
        if rows and x.rotation is not None:
            last = torch.arange(rows if choice == 0 else 40).clamp(max=rows - 1)
            options["rotation"] = tuple(table[last] for table in x.rotation)
        first = begin if choice else 0
        tokens = [y[first:].nan_to_num().requires_grad_() for y in (x.kv, x.gate)]
        assert x.ape is not None
        ape, given = x.ape.requires_grad_(), x.grad_entries.nan_to_num()
        cu_seqlens = torch.tensor(offsets[choice])
        entries = flashdsa.compress_kv(
            *tokens, ape, cu_seqlens=cu_seqlens, backend=backend, **options
        )
        assert entries is not None
        found = torch.autograd.grad(entries, (*tokens, ape), given[: len(entries)])
        entries, (d_kv, d_gate, d_ape) = entries.detach(), found
        more = len(given) - len(entries)
        return [
            torch.cat((entries, entries.new_zeros(more, entries.shape[1]))),
            *(torch.cat((y.new_zeros(first, y.shape[1]), y)) for y in (d_kv, d_gate)),
            d_ape,
        ]

    return call


def _seen(backend: str, choice: int, seed: int) -> Sequence[Tensor]:
    """Entries, and the states."""
    x = make_entries_inputs(POOLS, seed)
    state = torch.randn(2, 8, 2, 128, generator=_random(seed)).bfloat16()
    entries = flashdsa.compress_kv(
        x.kv,
        x.gate,
        x.ape,
        cu_seqlens=torch.tensor([0, 21, 40]),
        state=state,
        seen=torch.tensor([-3 if choice == 0 else 0, 2]),
        backend=backend,
        **x.options,
    )
    assert entries is not None
    return [entries, state]


def _turns(_: str, choice: int, seed: int) -> Sequence[Tensor]:
    x, *tables = (torch.randn(2, 8, generator=_random(seed + i)) for i in range(3))
    positions = torch.tensor(([-4, 2], [0, 1])[choice])
    return [flashdsa.rotate_tail(x, positions, (tables[0][:, :4], tables[1][:, :4]))]


def _group() -> Any:
    """The process group of the caller's test, of one rank."""
    return dist.group.WORLD


def _local_lengths(_: str, choice: int, seed: int) -> Sequence[Tensor]:
    """A length below 0 stays one, which an indexer clamps."""
    lengths = torch.tensor(([-5, 70], [0, 70])[choice], dtype=torch.int32)
    return [distributed.local_seq_lens(lengths, _group()).clamp(min=0)]


def _local_slots(_: str, choice: int, seed: int) -> Sequence[Tensor]:
    positions = torch.tensor(([[500, 3, 64]], [[-1, 3, -1]])[choice], dtype=torch.int32)
    return [distributed.local_slots(positions, torch.tensor([[1]], dtype=torch.int32), _group())]


def _decode(backend: str, choice: int, seed: int) -> Sequence[Tensor]:
    """A request whose table has no page."""
    x = make_indexer_inputs(IndexerCase("", (9,), 16, num_heads=16), seed)
    lengths = torch.tensor(([9], [0])[choice], dtype=torch.int32)
    rows = x.q, x.cache, x.weights, lengths, x.block_table[:, :0]
    return [distributed.decode_topk_indexer(*rows, _group(), topk=16, backend=backend)]


def _query_rows(backend: str, choice: int, seed: int) -> Sequence[Tensor]:
    """Queries of no local row see no key."""
    layout = distributed.SequenceLayout.zigzag(128, _group())
    rows = torch.tensor(([0, 50, -1, 128, 99], [0, 50, 0, 0, 99])[choice])
    generator = _random(seed)
    q = torch.randn(5, 16, 128, generator=generator).to(torch.float8_e4m3fn)
    k, weights = torch.randn(128, 128, generator=generator), torch.rand(5, 16, generator=generator)
    found = distributed.context_parallel_topk_indexer(
        q, k, weights, _group(), layout=layout, topk=64, query_rows=rows, backend=backend
    )
    if choice:
        found[2:4] = -1
    return [found]


REFUSED = [
    *(
        Refused(f"{kind}, a slot {what}", message, make(form, *slots), backends, len(slots) - 1)
        for (kind, make, form, of_kernels), (what, message, slots) in product(
            (
                ("kv rows", _writes_kv, None, OTHERS),
                ("rows of v32", _writes_kv, "v32", OTHERS),
                ("rows of v4", _writes_kv, "v4", OTHERS),
                ("index keys", _writes_index_keys, 132, HOPPER),
                ("MXFP4 index keys", _writes_index_keys, 68, OTHERS),
            ),
            (("outside", r"slots: expected slots in \[0, 128\)", OUTSIDE),
             ("twice", "slots: expected distinct slots; got 3 2 times", TWICE)),
        )
        # The emulator stops where Hopper's rows race.
        for backends in (of_kernels if what == "outside" else OTHERS,)
    ),
    Refused("kv rows read outside", r"slots: expected slots in \[0, 128\)", _reads(False)),
    Refused("index keys read outside", r"slots: expected slots in \[0, 128\)", _reads(True),
            HOPPER),
    Refused("a length below 0", "seq_lens: expected values >= 0", _of_pages((200, -5, 9)), EACH),
    Refused("a length beyond the table", "block_table: expected at least 16 pages",
            _of_pages((1000, 70, INT32_MAX)), EACH),
    Refused("a page outside", r"block_table: expected page ids in \[0,", _of_pages(LENGTHS, 99),
            EACH),
    Refused("a page below 0", r"block_table: expected page ids in \[0,", _of_pages(LENGTHS, -2),
            EACH),
    Refused("max_len below a length", "max_len: expected at least the longest of seq_lens, 200",
            _of_pages(LENGTHS, max_len=100), EACH),
    Refused("lengths of scores", r"lengths: expected values in \[0, 300\]", _topk_indices, EACH),
    Refused("starts", r"starts: expected values in \[0, 64\]",
            _ranges(([-4, 99, 5, 0], [0, 64, 5, 0]), ([9, 64, 5, 64],) * 2), EACH),
    Refused("ends", r"ends: expected values in \[starts, 64\]",
            _ranges(([0, 9, 5, 64],) * 2, ([70, 3, -5, INT32_MAX], [64, 9, 5, 64])), EACH),
    Refused("queries of a first offset", "cu_seqlens_q: expected offsets that begin at 0",
            _before_the_first),
    Refused("queries' offsets padded by 0", "cu_seqlens_q: expected offsets that do not decrease",
            _causal(([0, 5, 8, 0, 0], None, 8), ([0, 5, 8, 8, 8], None, 8))),
    Refused("keys' offsets padded by 0", "cu_seqlens_k: expected offsets that do not decrease",
            _causal(([0, 2, 5], [0, 4, 0], 5), ([0, 2, 5], [0, 4, 4], 5))),
    Refused("keys of a first offset", "cu_seqlens_k: expected offsets that begin at 0",
            _causal(([0, 2, 5], [1, 4, 6], 5), ([0, 2, 5], [0, 3, 5], 5))),
    Refused("keys beyond int32", "cu_seqlens_k: expected at most 2147483647",
            _causal(([0, 2], [0, 2**33], 2), ([0, 2], [0, INT32_MAX], 2))),
    Refused("fewer queries than offsets say", "num_queries: expected at least the last",
            _causal(([0, 2, 3], None, 2), ([0, 2, 3], None, 3), cut=2)),
    Refused("entries, a first offset", "cu_seqlens: expected offsets that begin at 0",
            _entries([8, 20, 31], [0, 12, 23], begin=8), HOPPER),
    Refused("entries, offsets padded by 0", "cu_seqlens: expected offsets that do not decrease",
            _entries([0, 21, 31, 0, 0], [0, 21, 31, 31, 31]), HOPPER),
    Refused("entries, offsets beyond T", "cu_seqlens: expected the last to be at most T, 40",
            _entries([0, 21, 90], [0, 21, 40]), HOPPER),
    Refused("entries, offsets of a slice", "cu_seqlens: expected offsets that begin at 0",
            _entries([100, 121, 140], [40, 40, 40]), HOPPER),
    Refused("entries, wild offsets", "cu_seqlens: expected offsets that begin at 0",
            _entries([-7, 5, 2, 2**40, 3], [0, 5, 5, 40, 40]), HOPPER),
    Refused("tokens seen below 0", "seen: expected at least 0; got -1", _seen, HOPPER),
    Refused("entries beyond a rotation's tables", "rotation: expected tables of at least 37 pos",
            _entries([0, 40], [0, 40], case=CSA_KEYS, rows=9), HOPPER),
    Refused("positions beyond a rotation's tables", "positions: expected rows of the rotation's",
            _turns),
    Refused("lengths of a rank below 0", "seq_lens: expected values >= 0", _local_lengths),
    Refused("positions beyond a rank's table", "block_table_local: expected at least 8 pages",
            _local_slots),
    Refused("a rank's table without a page", "block_table_local: expected at least 1 page",
            _decode),
    Refused("rows of queries outside", r"query_rows: expected values in \[0, 128\)", _query_rows),
]  # fmt: skip
