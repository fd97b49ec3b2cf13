"""The rank of each page of a sequence, and the table that leads from tokens to gathered rows.

Tokens lie on the ranks in whole pages of 64. An all-gather returns the shards one after
another, the *gathered rows*; `block_table` lists their pages in the order of the tokens, so that
the indexer's ids address gathered rows directly and nothing is ever reordered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashdsa.dispatch.checks import require_positive, require_tensor
from flashdsa.distributed.agree import agreement
from flashdsa.distributed.collectives import as_bytes, of_dtype
from flashdsa.distributed.group import Mesh, describe, device_of_group, group_of
from flashdsa.distributed.latents import all_gather_differentiable
from flashdsa.errors import ArgumentTypeError, ArgumentValueError
from flashdsa.problem import INT32_MAX, PAGE_SIZE

PADDING = -1
"""Value instead of a page, a token or a row that does not exist."""


@dataclass(frozen=True, eq=False, repr=False)
class SequenceLayout:
    """Layout of the tokens of one step on the ranks. Make one by `zigzag` and its siblings.

    Every rank has the same number of local rows, `num_local`; those without a token are padding.
    A layout is of one rank: `positions` and what follows it differ from rank to rank.

    Attributes:
        kind: "zigzag", "contiguous", "interleaved" or "packed".
        cu_seqlens: first token of each document, and the number of tokens: (0, ..., seq_len).
        rank, num_ranks: of this process, and of the group.
        tokens: int64 [num_ranks * num_local], the token of each gathered row, -1 of padding.
        rows: int32 [seq_len], the gathered row of each token.
        positions: int64 [num_local], the token of each local row, -1 of padding.
        documents: int64 [num_local], the document of each local row, 0 of padding.
        seq_lens: int32 [num_local], keys that each local query sees: those of its document up to
            itself. 0 of padding.
        block_table: int32 [documents, max_pages], the pages of the gathered cache in token order.
        mesh: of a layout that was made of one; `unshard` needs it.
    """

    kind: str
    cu_seqlens: tuple[int, ...]
    rank: int
    num_ranks: int
    tokens: Tensor
    rows: Tensor
    positions: Tensor
    documents: Tensor
    seq_lens: Tensor
    block_table: Tensor
    mesh: DeviceMesh | dist.ProcessGroup | None
    fingerprint: str

    @property
    def seq_len(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def summary(self) -> str:
        """A few words for messages; equal for equal layouts."""
        sizes = f"{self.seq_len} tokens on {self.num_ranks} ranks"
        return f"{self.kind} of {sizes} ({self.fingerprint})"

    @property
    def num_local(self) -> int:
        """Rows of a shard, padding included; a multiple of 64."""
        return self.positions.shape[0]

    @classmethod
    def zigzag(cls, seq_len: int, mesh: Mesh) -> SequenceLayout:
        """2P chunks of whole pages; rank r has chunk r and chunk 2P - 1 - r.

        Balances causal work that grows with the position, as the indexer's does. If 2P * 64
        divides `seq_len`, it is the order of torch's head-tail load balancer.

        Args:
            seq_len: tokens of the one sequence.
            mesh: a 1-D DeviceMesh, a ProcessGroup, or (rank, num_ranks) without communication.
        """
        num_ranks = _size(mesh)
        chunk = -(-_pages(seq_len) // (2 * num_ranks))
        chunks = torch.arange(2 * num_ranks * chunk).view(2 * num_ranks, chunk)
        pages = torch.cat([chunks[:num_ranks], chunks[num_ranks:].flip(0)], dim=1)
        return _layout("zigzag", pages, (0, seq_len), mesh)

    @classmethod
    def contiguous(cls, seq_len: int, mesh: Mesh) -> SequenceLayout:
        """Rank r has the r-th part of the sequence. Causal work is out of balance: at many ranks
        the last one scores twice the mean. Arguments as for `zigzag`."""
        num_ranks = _size(mesh)
        count = -(-_pages(seq_len) // num_ranks)
        pages = torch.arange(num_ranks * count).view(num_ranks, count)
        return _layout("contiguous", pages, (0, seq_len), mesh)

    @classmethod
    def interleaved(cls, seq_len: int, mesh: Mesh, block: int = PAGE_SIZE) -> SequenceLayout:
        """Blocks of `block` tokens, a multiple of 64, go round the ranks; else as `zigzag`."""
        require_positive("block", block)
        if block % PAGE_SIZE:
            raise ArgumentValueError(f"block: expected a multiple of {PAGE_SIZE}; got {block}")
        num_ranks, size = _size(mesh), block // PAGE_SIZE
        count = -(-_pages(seq_len) // (size * num_ranks))
        pages = torch.arange(num_ranks * count * size).view(count, num_ranks, size)
        pages = pages.transpose(0, 1).reshape(num_ranks, count * size)
        return _layout("interleaved", pages, (0, seq_len), mesh)

    @classmethod
    def packed(cls, cu_seqlens: Sequence[int] | Tensor, mesh: Mesh) -> SequenceLayout:
        """Several documents in a row, each in pages of its own, balanced over the ranks.

        The pages go to the ranks in order of their place in their document, the last ones first,
        there and back again (0, 1, .., P-1, P-1, .., 0): so every rank gets as many, and as long
        contexts. Queries see keys of their own document only.

        Args:
            cu_seqlens: (0, .., seq_len), ascending: where documents begin, and the end.
            mesh: as for `zigzag`.
        """
        bounds = tuple(int(one) for one in cu_seqlens)
        lengths = [end - start for start, end in pairwise(bounds)]
        if len(bounds) < 2 or bounds[0] != 0 or min(lengths) < 1:
            raise ArgumentValueError(
                "cu_seqlens: expected (0, .., seq_len), each more than the one before; got "
                f"{list(bounds)}"
            )
        num_ranks = _size(mesh)
        of_page = torch.cat([torch.arange(_pages(length)) for length in lengths])
        order = of_page.sort(descending=True, stable=True).indices
        rounds = -(-len(order) // num_ranks)
        dealt = torch.full((rounds * num_ranks,), len(order), dtype=torch.int64)
        dealt[: len(order)] = order
        dealt = dealt.view(rounds, num_ranks)
        dealt[1::2] = dealt[1::2].flip(1)
        return _layout("packed", dealt.t().sort(dim=1).values, bounds, mesh)

    def key_row(self, positions: Tensor) -> Tensor:
        """The gathered rows, int32, of the tokens `positions` (any shape, int32 or int64); -1 for
        values outside [0, seq_len)."""
        valid = (positions >= 0) & (positions < self.seq_len)
        rows = self.rows.to(positions.device)[positions.clamp(0, self.seq_len - 1).long()]
        return torch.where(valid, rows, PADDING)

    def token_of(self, rows: Tensor) -> Tensor:
        """The tokens, int32, of gathered `rows` (any shape, int32 or int64); -1 for padding and for
        values that are no row."""
        valid = (rows >= 0) & (rows < len(self.tokens))
        tokens = self.tokens.to(rows.device)[rows.clamp(0, len(self.tokens) - 1).long()]
        return torch.where(valid, tokens, PADDING).int()

    def shard(self, tensor: Tensor, dim: int = 0, *, padding: float = 0) -> Tensor:
        """This rank's part of `tensor`, whose dimension `dim` has all tokens; `padding` elsewhere.

        Index rows of padding must be -1: ``layout.shard(indices, padding=-1)``.
        """
        self._require_size("tensor", tensor, dim, self.seq_len)
        positions = self.positions.to(tensor.device)
        local = as_bytes(tensor).index_select(dim, positions.clamp_min(0))
        shape = [1] * tensor.dim()
        shape[dim] = self.num_local
        value: float = padding
        if local.dtype != tensor.dtype:
            filler = torch.tensor(padding, dtype=tensor.dtype) if padding else None
            value = 0 if filler is None else int(filler.view(local.dtype))
        local = local.masked_fill((positions < 0).view(shape), value)
        return of_dtype(local, tensor.dtype)

    def unshard(self, local: Tensor, dim: int = 0) -> Tensor:
        """The whole tensor, in token order, from every rank's part; differentiable.

        The gradient of a part is the sum of what all ranks give it, added in the order of ranks.
        Ranks that differ, or a wrong argument of one, are an error on every rank.
        """
        call = "SequenceLayout.unshard"
        if self.num_ranks > 1 and self.mesh is not None and not torch.compiler.is_compiling():
            with agreement(group_of(self.mesh, call), local) as facts:
                self._require_size("local", local, dim, self.num_local)
                facts |= {"local": describe(local), "dim": str(dim), "layout": self.summary}
                facts["gradient"] = str(torch.is_grad_enabled() and local.requires_grad)
        self._require_size("local", local, dim, self.num_local)
        gathered = local.movedim(dim, 0)
        if self.num_ranks > 1:
            if self.mesh is None:
                raise ArgumentValueError(
                    "layout: expected one made with a DeviceMesh or a ProcessGroup, since "
                    "unshard communicates; this one was made of (rank, num_ranks)"
                )
            gathered = all_gather_differentiable(gathered, group_of(self.mesh, call))
        return self.restore(gathered).movedim(0, dim)

    def restore(self, gathered: Tensor) -> Tensor:
        """The tokens in order, [seq_len, ...], from gathered rows [num_ranks * num_local, ...]."""
        self._require_size("gathered", gathered, 0, len(self.tokens))
        rows = self.rows.to(gathered.device)
        return of_dtype(as_bytes(gathered).index_select(0, rows), gathered.dtype)

    def entries(self, ratio: int) -> SequenceLayout:
        """The layout of compressed entries of `ratio` tokens, counted through all documents: an
        entry is of the rank whose token completes it.

        `num_local` is the most that a rank has. `positions` are entries, `seq_lens` those that a
        query after the entry's last token sees, and there is no `block_table`.
        """
        require_positive("ratio", ratio)
        bounds = torch.tensor(self.cu_seqlens, dtype=torch.int64)
        counts = bounds.diff() // ratio
        documents = torch.arange(len(counts)).repeat_interleave(counts)
        in_document = torch.arange(len(documents)) - (counts.cumsum(0) - counts)[documents]
        last = bounds[documents] + (in_document + 1) * ratio - 1
        owners = self.rows.cpu().long()[last] // self.num_local
        num_local = int(owners.bincount(minlength=self.num_ranks).max())
        tokens = torch.full((self.num_ranks, num_local), PADDING, dtype=torch.int64)
        for rank in range(self.num_ranks):
            own = (owners == rank).nonzero().flatten()
            tokens[rank, : len(own)] = own
        rows = torch.empty(len(documents), dtype=torch.int32)
        held = tokens.flatten() >= 0
        rows[tokens.flatten()[held]] = held.nonzero().flatten().int()
        positions = tokens[self.rank]
        here = torch.where(positions < 0, 0, documents[positions.clamp_min(0)])
        seen = torch.where(positions < 0, 0, in_document[positions.clamp_min(0)] + 1).int()
        device = self.tokens.device
        return SequenceLayout(
            kind=f"entries of {ratio}, {self.kind}",
            cu_seqlens=(0, *counts.cumsum(0).tolist()),
            rank=self.rank,
            num_ranks=self.num_ranks,
            tokens=tokens.flatten().to(device),
            rows=rows.to(device),
            positions=positions.to(device),
            documents=here.to(device),
            seq_lens=seen.to(device),
            block_table=torch.empty(len(counts), 0, dtype=torch.int32, device=device),
            mesh=self.mesh,
            fingerprint=f"{self.fingerprint}/{ratio}",
        )

    def require_place(self, group: dist.ProcessGroup) -> None:
        """Raise ArgumentValueError unless the layout is of this rank of `group`."""
        here = (group.rank(), group.size())
        if (self.rank, self.num_ranks) != here:
            raise ArgumentValueError(
                "layout: expected one of rank {} of {}, as mesh says; ".format(*here)
                + f"got rank {self.rank} of {self.num_ranks}"
            )

    def __repr__(self) -> str:
        return f"<SequenceLayout {self.summary}, rank {self.rank}>"

    def _require_size(self, name: str, tensor: Tensor, dim: int, size: int) -> None:
        require_tensor(name, tensor)
        if not -tensor.dim() <= dim < tensor.dim():
            raise ArgumentValueError(
                f"dim: expected a dimension of {name}, which has {tensor.dim()}; got {dim}"
            )
        if tensor.shape[dim] != size:
            raise ArgumentValueError(
                f"{name}: expected {size} rows in dimension {dim} ({self.kind} layout of "
                f"{self.seq_len} tokens on {self.num_ranks} ranks); got {tensor.shape[dim]}"
            )


def require_layout(value: object) -> None:
    """`value`, the argument `layout`, is a SequenceLayout."""
    if not isinstance(value, SequenceLayout):
        raise ArgumentTypeError(f"layout: expected a SequenceLayout; got {type(value).__name__}")


def _size(mesh: Mesh) -> int:
    return _place(mesh)[1]


def _place(mesh: Mesh) -> tuple[int, int]:
    """(rank, number of ranks)."""
    if not isinstance(mesh, tuple):
        group = group_of(mesh)
        return group.rank, group.size
    if len(mesh) != 2 or not all(type(one) is int for one in mesh):
        raise ArgumentTypeError(f"mesh: expected two integers, (rank, num_ranks); got {mesh!r}")
    rank, num_ranks = mesh
    if not 0 <= rank < num_ranks:
        raise ArgumentValueError(f"mesh: expected a rank in [0, num_ranks); got {mesh!r}")
    return rank, num_ranks


def _pages(num_tokens: int) -> int:
    require_positive("seq_len", num_tokens)
    return -(-num_tokens // PAGE_SIZE)


def _layout(kind: str, pages: Tensor, cu_seqlens: tuple[int, ...], mesh: Mesh) -> SequenceLayout:
    """The layout in which rank r holds the pages `pages[r]` [num_ranks, pages of a rank].

    Pages are counted through all documents; numbers from their count on are padding.
    """
    rank, num_ranks = _place(mesh)
    real_mesh = None if isinstance(mesh, tuple) else mesh
    bounds = torch.tensor(cu_seqlens, dtype=torch.int64)
    pages_of = (bounds.diff() + PAGE_SIZE - 1) // PAGE_SIZE
    first_page = pages_of.cumsum(0) - pages_of
    document = torch.arange(len(pages_of)).repeat_interleave(pages_of)
    in_document = torch.arange(len(document)) - first_page[document]
    offset = torch.arange(PAGE_SIZE)

    flat = pages.flatten()
    if flat.numel() * PAGE_SIZE > INT32_MAX:
        raise ArgumentValueError(
            f"seq_len: expected at most {INT32_MAX} gathered rows (int32 ids); "
            f"got {flat.numel() * PAGE_SIZE}"
        )
    real = flat < len(document)
    page = torch.where(real, flat, 0)
    token = (bounds[document] + in_document * PAGE_SIZE)[page][:, None] + offset
    valid = real[:, None] & (token < bounds[document + 1][page][:, None])
    tokens = torch.where(valid, token, PADDING).flatten()

    rows = torch.empty(cu_seqlens[-1], dtype=torch.int32)
    rows[tokens[tokens >= 0]] = (tokens >= 0).nonzero().flatten().int()
    gathered_page = torch.empty(len(document), dtype=torch.int32)
    gathered_page[flat[real]] = real.nonzero().flatten().int()
    block_table = torch.zeros(len(pages_of), int(pages_of.max()), dtype=torch.int32)
    block_table[document, in_document] = gathered_page

    mine = slice(rank * pages.shape[1], (rank + 1) * pages.shape[1])
    positions = tokens.view(-1, PAGE_SIZE)[mine].flatten()
    documents = document[page[mine]].repeat_interleave(PAGE_SIZE).masked_fill(positions < 0, 0)
    seq_lens = torch.where(positions < 0, 0, positions - bounds[documents] + 1).int()
    text = f"{kind} {cu_seqlens} {pages.tolist()}"
    device = torch.device("cpu") if real_mesh is None else device_of_group(real_mesh)
    return SequenceLayout(
        kind=kind,
        cu_seqlens=cu_seqlens,
        rank=rank,
        num_ranks=num_ranks,
        tokens=tokens.to(device),
        rows=rows.to(device),
        positions=positions.to(device),
        documents=documents.to(device),
        seq_lens=seq_lens.to(device),
        block_table=block_table.to(device),
        mesh=real_mesh,
        fingerprint=hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
    )
