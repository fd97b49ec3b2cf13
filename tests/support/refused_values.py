"""Values that the CPU refuses: a call with each, and the calls that the promise says it equals.

The promise is "Values" in docs/concepts/dsa.md. What it says of a value is a call with another one
in its place, or what is made of the results of that call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import flashdsa
from flashdsa import distributed
from flashdsa.problem import INT32_MAX
from flashdsa.verify.entries_cases import EntriesCase, make_entries_inputs
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs
from flashdsa.verify.prefill_cases import PrefillCase, make_prefill_inputs


class Trial(NamedTuple):
    """A call that is made.

    Attributes:
        choice: 0 for the call with the refused value, 1 for the call that it should equal, and more
            where either result will do.
        seed: of all other values.
        device: of the tensors.
    """

    backend: str
    choice: int
    seed: int
    device: str = "cpu"

    def random(self) -> torch.Generator:
        """The same generator for every choice."""
        return torch.Generator().manual_seed(self.seed)

    def tensor(self, *values: Any, dtype: torch.dtype | None = None) -> Tensor:
        """The values of this choice."""
        return torch.tensor(values[self.choice], dtype=dtype, device=self.device)


Call = Callable[[Trial], Sequence[Tensor]]
"""What a call returns or writes."""
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
        of_ranks: the call wants a process group, which is the CPU's.
    """

    name: str
    message: str
    call: Call
    backends: tuple[str, ...] = OTHERS
    choices: int = 1
    of_ranks: bool = False


def _writes_kv(kv_format: str | None, *slots: list[int]) -> Call:
    """Of a cache of 128 slots, written with each list of slots."""

    def call(at: Trial) -> Sequence[Tensor]:
        width = {None: 512, "v32": 656, "v4": 584}[kv_format]
        cache = torch.randint(100, (2, 64, 1, width), generator=at.random())
        cache = cache.to(at.device, torch.bfloat16 if kv_format is None else torch.uint8)
        rows = torch.randn(4, 576 if kv_format == "v32" else 512, generator=at.random())
        flashdsa.write_kv_cache(rows.to(at.device), at.tensor(*slots), cache, kv_format=kv_format)
        return [cache.view(torch.uint8)]

    return call


def _writes_index_keys(token_bytes: int, *slots: list[int]) -> Call:
    def call(at: Trial) -> Sequence[Tensor]:
        cache = torch.randint(100, (2, 64, 1, token_bytes), generator=at.random())
        cache = cache.to(at.device, torch.uint8)
        k = torch.randn(4, 128, generator=at.random()).to(at.device, torch.bfloat16)
        flashdsa.write_index_k_cache(k, at.tensor(*slots), cache, backend=at.backend)
        return [cache]

    return call


OUTSIDE = [3, 999, -7, 128], [3, -1, -1, -1]
TWICE = [3, 5, 3, 7], [3, 5, -1, 7], [-1, 5, 3, 7]


def _reads(of_index_keys: bool) -> Call:
    """Slots outside read as 0."""

    def call(at: Trial) -> Sequence[Tensor]:
        slots = at.tensor([3, 128, -7, 5], [3, 0, 0, 5])
        row = 132 if of_index_keys else 656
        cache = torch.randint(100, (2, 64, 1, row), generator=at.random()).to(
            at.device, torch.uint8
        )
        if of_index_keys:
            read = flashdsa.read_index_k_cache(cache, slots, backend=at.backend)
            found = [x.view(torch.uint8).clone() for x in read]
        else:
            found = [flashdsa.read_kv_cache(cache, slots)]
        if at.choice:
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

    def call(at: Trial) -> Sequence[Tensor]:
        case = IndexerCase("", LENGTHS, 512, num_heads=16, positions=True)
        x = make_indexer_inputs(case, at.seed, at.device)
        q, cache, weights, _, table = x.operands
        table = (table % len(cache)).clone()
        width = table.shape[1] * 64
        clamped = [min(max(n, 0), width) for n in lengths]
        seq_lens = at.tensor(lengths, clamped, dtype=torch.int32)
        if page is not None and at.choice == 0:
            table[0, 1] = page
        rows = q, cache, weights, seq_lens, table
        size = max_len if at.choice == 0 else meant
        scores = flashdsa.indexer_logits(*rows, size, backend=at.backend)[:, :max_len]
        ids = torch.full((len(q), 512), POISON, dtype=torch.int32, device=at.device)
        if max_len == meant:
            flashdsa.dsa_topk_indexer(*rows, ids, ids="position", backend=at.backend)
        ids = ids.sort(dim=1, descending=True).values
        if page is not None and at.choice == 1:  # whose tokens are not chosen
            scores[0, 64:128] = -torch.inf
            ids[0] = ids[0].masked_fill((ids[0] >= 64) & (ids[0] < 128), -1)
            ids = ids.sort(dim=1, descending=True).values
        return [scores, ids]

    return call


def _topk_indices(at: Trial) -> Sequence[Tensor]:
    scores = torch.randn(3, 300, generator=at.random()).to(at.device)
    lengths = at.tensor([-3, 301, INT32_MAX], [0, 300, 300], dtype=torch.int32)
    return [flashdsa.topk_indices(scores, lengths, 20, sorted=True, backend=at.backend)]


def _ranges(starts: Sequence[list[int]], ends: Sequence[list[int]]) -> Call:
    """Scores and choice of 4 queries over 64 keys."""

    def call(at: Trial) -> Sequence[Tensor]:
        case = PrefillCase("", ((0, 55),) * 4, 512, num_heads=16, sorted=True)
        x = make_prefill_inputs(case, at.seed, at.device)
        keys = x.k_index.float().nan_to_num().clamp(-400, 400).to(x.k_index.dtype)
        scales = torch.rand(64, generator=at.random()).to(at.device)
        given = (at.tensor(*one, dtype=torch.int32) for one in (starts, ends))
        rows = x.q_index, keys, x.weights, *given
        scores = flashdsa.prefill_logits(*rows, k_scale=scales, backend=at.backend)
        ids = torch.full((4, 512), POISON, dtype=torch.int32, device=at.device)
        flashdsa.dsa_topk_prefill(*rows, ids, k_scale=scales, sorted=True, backend=at.backend)
        return [scores, ids]

    return call


def _causal(*offsets: tuple[list[int], list[int] | None, int], cut: int | None = None) -> Call:
    """Ranges of these (queries', keys', number of queries); of the second ones the first `cut`."""

    def call(at: Trial) -> Sequence[Tensor]:
        q, k, queries = offsets[at.choice]
        cu_q, cu_k = (None if x is None else torch.tensor(x, device=at.device) for x in (q, k))
        assert cu_q is not None
        found = flashdsa.causal_ranges(cu_q, cu_k, num_queries=queries)
        return [x[:cut] for x in found]

    return call


def _before_the_first(at: Trial) -> Sequence[Tensor]:
    """Two queries more, which see nothing."""
    found = flashdsa.causal_ranges(at.tensor([2, 5, 8], [0, 3, 6]))
    return found if at.choice == 0 else [torch.cat((x.new_zeros(2), x)) for x in found]


POOLS = EntriesCase("", (40,), 4, 128, norm=False, rotated=0)
CSA_KEYS = EntriesCase("", (40,), 4, 128, overlap=True)


def _entries(*offsets: list[int], case: EntriesCase = POOLS, begin: int = 0, rows: int = 0) -> Call:
    """Entries and gradients; of the second offsets with the first `begin` rows behind all others.
    `rows`: of the rotation's tables; the second ones repeat the last row."""

    def call(at: Trial) -> Sequence[Tensor]:
        x = make_entries_inputs(case, at.seed, at.device)
        options = x.options
        if rows and x.rotation is not None:
            last = torch.arange(40 if at.choice else rows).clamp(max=rows - 1)
            options["rotation"] = tuple(table[last.to(at.device)] for table in x.rotation)
        moved = begin if at.choice else 0
        tokens = [y.nan_to_num().roll(-moved, 0).requires_grad_() for y in (x.kv, x.gate)]
        assert x.ape is not None
        ape, given = x.ape.requires_grad_(), x.grad_entries.nan_to_num()
        entries = flashdsa.compress_kv(
            *tokens, ape, cu_seqlens=at.tensor(*offsets), backend=at.backend, **options
        )
        assert entries is not None
        d_kv, d_gate, d_ape = torch.autograd.grad(entries, (*tokens, ape), given)
        return [entries.detach(), d_kv.roll(moved, 0), d_gate.roll(moved, 0), d_ape]

    return call


def _seen(at: Trial) -> Sequence[Tensor]:
    """Entries, and the states."""
    x = make_entries_inputs(POOLS, at.seed, at.device)
    state = torch.randn(2, 8, 2, 128, generator=at.random()).to(at.device, torch.bfloat16)
    entries = flashdsa.compress_kv(
        x.kv,
        x.gate,
        x.ape,
        cu_seqlens=torch.tensor([0, 21, 40], device=at.device),
        state=state,
        seen=at.tensor([-3, 2], [0, 2]),
        backend=at.backend,
        **x.options,
    )
    assert entries is not None
    return [entries, state]


def _turns(at: Trial) -> Sequence[Tensor]:
    x, cos, sin = torch.randn(3, 2, 8, generator=at.random()).to(at.device)
    return [flashdsa.rotate_tail(x, at.tensor([-4, 2], [0, 1]), (cos[:, :4], sin[:, :4]))]


def _group() -> Any:
    """The process group of the caller's test, of one rank."""
    return dist.group.WORLD


def _local_lengths(at: Trial) -> Sequence[Tensor]:
    """A length below 0 stays one, which an indexer clamps."""
    lengths = at.tensor([-5, 70], [0, 70], dtype=torch.int32)
    return [distributed.local_seq_lens(lengths, _group()).clamp(min=0)]


def _local_slots(at: Trial) -> Sequence[Tensor]:
    positions = at.tensor([[500, 3, 64]], [[-1, 3, -1]], dtype=torch.int32)
    return [distributed.local_slots(positions, torch.tensor([[1]], dtype=torch.int32), _group())]


def _decode(at: Trial) -> Sequence[Tensor]:
    """A request whose table has no page."""
    x = make_indexer_inputs(IndexerCase("", (9,), 16, num_heads=16), at.seed)
    lengths = at.tensor([9], [0], dtype=torch.int32)
    rows = x.q, x.cache, x.weights, lengths, x.block_table[:, :0]
    return [distributed.decode_topk_indexer(*rows, _group(), topk=16, backend=at.backend)]


def _query_rows(at: Trial) -> Sequence[Tensor]:
    """Queries of no local row see no key."""
    layout = distributed.SequenceLayout.zigzag(128, _group())
    rows = at.tensor([0, 50, -1, 128, 99], [0, 50, 0, 0, 99])
    generator = at.random()
    q = torch.randn(5, 16, 128, generator=generator).to(torch.float8_e4m3fn)
    k, weights = torch.randn(128, 128, generator=generator), torch.rand(5, 16, generator=generator)
    found = distributed.context_parallel_topk_indexer(
        q, k, weights, _group(), layout=layout, topk=64, query_rows=rows, backend=at.backend
    )
    if at.choice:
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
    Refused("lengths of a rank below 0", "seq_lens: expected values >= 0", _local_lengths,
            of_ranks=True),
    Refused("positions beyond a rank's table", "block_table_local: expected at least 8 pages",
            _local_slots, of_ranks=True),
    Refused("a rank's table without a page", "block_table_local: expected at least 1 page",
            _decode, of_ranks=True),
    Refused("rows of queries outside", r"query_rows: expected values in \[0, 128\)", _query_rows,
            of_ranks=True),
]  # fmt: skip
