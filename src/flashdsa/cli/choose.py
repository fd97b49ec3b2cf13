"""`flashdsa choose`: which backend and kernels serve a call of given sizes, and why; no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option, print_json
from flashdsa.settings import BACKENDS

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("v32", "v32_no_rope", "v4", "v41", "v41_fp4", "v41_interleaved", "v41_fp4_interleaved")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
GPUS = ("h200", "b200", "a100")
MOST_BYTES = 2**40
"""Bytes of one tensor, at most: more than a GPU has."""
Given = SimpleNamespace
"""The values of a command's options."""
Arguments = Callable[[Given], tuple[tuple[Any, ...], dict[str, Any]]]
"""Function that gives the operands of the operation's function, and the rest by keyword."""


def _size(name: str, default: int | None, text: str) -> Callable[..., Any]:
    shown = default is not None
    return click.option(name, type=click.IntRange(min=1), default=default, show_default=shown,
                        help=text)  # fmt: skip


def _flag(name: str, text: str) -> Callable[..., Any]:
    return click.option(name, is_flag=True, help=text)


_HEADS = _size("--heads", 128, "Of q.")
_INDEX_HEADS = _size("--heads", 64, "Of the index queries.")
_DTYPE = click.option(
    "--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True, help="Of q."
)
_LENGTHS = click.option("--lengths/--no-lengths", help="Lists have lengths.  [default: none]")
_LISTS = (
    _size("--queries", 4096, "Rows of q."),
    _size("--keys", 65536, "Rows of kv, or of the index keys."),
    _size("--topk", 2048, "Slots of a query."),
    _LENGTHS,
)
_D_QK = _size("--d-qk", None, "Columns of q.  [default: of the format; bf16: 576]")
_SINK = _flag("--sink", "With attn_sink.")
_SORTED = _flag("--sorted", "The best come first.")
_DETERMINISTIC = _flag("--deterministic", "The same bits in every run.")
_BLOCK = _size("--block", 1, "Positions of a block.")
_CANDIDATES = _size("--candidates", None, "Listed blocks of a query, to choose tokens from.")
_FORMAT = click.option(
    "--format", "form", type=click.Choice(("bf16", *FORMATS)), default="bf16", show_default=True,
    metavar="FORMAT", help=f"Of kv's rows: bf16, those of --dtype, or {', '.join(FORMATS)}.",
)  # fmt: skip
_SOURCES = (
    _flag("--range", "The list is a range of rows; --topk does not matter."),
    _size("--index-block", 1, "Rows of kv that an id names."),
    _size("--extra-keys", None, "Rows of a second source.  [default: none]"),
    _size("--extra-topk", 128, "Slots of a query in it."),
    _flag("--extra-range", "Its list is a range; --extra-topk does not matter."),
)
_ATTENTION = (*_LISTS, _HEADS, _D_QK, _DTYPE, _SINK)
_PACKED = (
    _FORMAT,
    click.option("--extra-format", type=click.Choice(FORMATS), metavar="FORMAT",
                 help="Of packed rows of the second source.  [default: --format's]"),
    _flag("--max-logits", "The largest logits are asked for."),
    _flag("--batch-invariant", "A query's bits do not depend on the others."),
)  # fmt: skip


@click.group()
def choose() -> None:
    """Show which backend and which kernels serve a call, and why; needs no GPU.

    An operation's own code checks the sizes and chooses: tensors without values
    go the way of a call. flashdsa.explain does the same with a call's tensors.

    \b
    What is printed
      the backend         others that would serve the call, and why others do not
      kernels             as the workbench's `plan` and `inspect` take them; of
                          Triton's the grid, tile, warps and stages
      what was chosen     ">" marks what the call runs, with times predicted on an
                          H200 where there are any, and rules

    Exit code 2 for a call that nobody serves.
    """


ARGUMENTS: dict[str, Arguments] = {}
"""By the name of the command."""


def _command(
    name: str, text: str, arguments: Arguments, options: Iterable[Callable[..., Any]]
) -> None:
    """Add `flashdsa choose NAME`, which explains the operation's function."""

    def run(gpu: str | None, backend: str, as_json: bool, **given: Any) -> None:
        import flashdsa

        operands, more = arguments(Given(**given))
        gpu = gpu or ("b200" if backend == "sm100" else "h200")
        function = "sparse_mla_fwd" if name == "sparse_mla" else name
        found = flashdsa.explain(function, *operands, gpu=gpu, backend=backend, **more)
        if as_json:
            print_json(found.as_dict())
        else:
            click.echo(str(found))

    backends = [one for one in BACKENDS if not one.startswith("emulate-")]
    shared = (
        json_option,
        click.option("--backend", type=click.Choice(backends), default="auto", show_default=True,
                     help="As the call names it."),
        click.option("--gpu", type=click.Choice(GPUS), help="[default: h200; b200 for sm100]"),
    )  # fmt: skip
    for option in (*shared, *reversed([*options])):
        run = option(run)
    run.__doc__ = text
    choose.command(name)(run)
    ARGUMENTS[name] = arguments


def _tensor(name: str, *shape: int, dtype: str = "bfloat16") -> Tensor:
    """A tensor without values.

    Raises:
        ArgumentValueError: no GPU has room for it.
    """
    import torch

    from flashdsa.errors import ArgumentValueError

    kind: torch.dtype = getattr(torch, dtype)
    if prod(shape) * kind.itemsize > MOST_BYTES:
        raise ArgumentValueError(
            f"{name}: no GPU has room for {prod(shape) * kind.itemsize:.1e} bytes, {list(shape)}"
        )
    return torch.empty(shape, dtype=kind, device="meta")


def _ids(name: str, *shape: int) -> Tensor:
    return _tensor(name, *shape, dtype="int32")


def _rows(name: str, keys: int, d_qk: int, dtype: str, form: str | None) -> Tensor:
    """Rows of a source: packed ones in pages of 64."""
    from flashdsa.problem import PAGE_SIZE
    from flashdsa.row_formats import ROW_FORMATS

    if form is None:
        return _tensor(name, keys, d_qk, dtype=dtype)
    pages, row_bytes = -(-keys // PAGE_SIZE), ROW_FORMATS[form].row_bytes
    return _tensor(name, pages, PAGE_SIZE, 1, row_bytes, dtype="uint8")


def _attention(o: Given) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """q, kv, and the arguments that the forward and the backward share."""
    from flashdsa.row_formats import ROW_FORMATS

    dtype, given = DTYPES[o.dtype], vars(o)
    form = None if given.get("form", "bf16") == "bf16" else o.form
    extra_form = form and (o.extra_format or form)
    d_qk = o.d_qk or (576 if form is None else ROW_FORMATS[form].d_qk)
    lists: dict[str, Any] = {"indices": _list("indices", o.queries, o.topk, o.range)}
    lists["index_block"] = o.index_block
    if o.lengths and not o.range:
        lists["topk_length"] = _ids("topk_length", o.queries)
    if o.extra_keys:
        lists["extra_kv"] = _rows("extra_kv", o.extra_keys, d_qk, dtype, extra_form)
        lists["extra_indices"] = _list("extra_indices", o.queries, o.extra_topk, o.extra_range)
        if o.lengths and not o.extra_range:
            lists["extra_topk_length"] = _ids("extra_topk_length", o.queries)
    if form is not None:
        # The name of e4m3 rows tells those of e2m1 beside them, not the other way.
        lists["kv_format"] = extra_form if ROW_FORMATS[form].fp4 and o.extra_keys else form
    kv = _rows("kv", o.keys, d_qk, dtype, form)
    return _tensor("q", o.queries, o.heads, d_qk, dtype=dtype), kv, lists | _sink(o)


def _list(name: str, queries: int, topk: int, is_range: bool) -> Any:
    """Ids, or the starts and ends of ranges."""
    if is_range:
        return _ids(name, queries), _ids(name, queries)
    return _ids(name, queries, topk)


def _sink(o: Given) -> dict[str, Any]:
    return {"attn_sink": _tensor("attn_sink", o.heads, dtype=_sums(o))} if o.sink else {}


def _lse(o: Given) -> Tensor:
    return _tensor("lse", o.queries, o.heads, dtype=_sums(o))


def _sums(o: Given) -> str:
    """The dtype of sums."""
    return "float64" if o.dtype == "fp64" else "float32"


def _d_v(q: Tensor) -> int:
    from flashdsa.problem import D_V

    return min(D_V, int(q.shape[2]))


def _forward(o: Given) -> tuple[tuple[Any, ...], dict[str, Any]]:
    q, kv, more = _attention(o)
    more |= {"return_max_logits": o.max_logits, "batch_invariant": o.batch_invariant}
    return (q, kv), {"d_v": _d_v(q), **more}


def _backward(o: Given) -> tuple[tuple[Any, ...], dict[str, Any]]:
    q, kv, more = _attention(o)
    dO = _tensor("dO", o.queries, o.heads, _d_v(q), dtype=DTYPES[o.dtype])
    indices = more.pop("indices")
    return (q, kv, dO, _lse(o), dO.clone(), indices), {"deterministic": o.deterministic, **more}


def _lengths(o: Given) -> dict[str, Any]:
    return {"topk_length": _ids("topk_length", o.queries)} if o.lengths else {}


def _target(o: Given) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtype, d_qk = DTYPES[o.dtype], o.d_qk or 576
    q = _tensor("q", o.queries, o.heads, d_qk, dtype=dtype)
    indices = _ids("indices", o.queries, o.topk)
    return (q, _tensor("kv", o.keys, d_qk, dtype=dtype), _lse(o), indices), _lengths(o) | _sink(o)


def _index(o: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Index queries, keys and weights."""
    dtype = "float8_e4m3fn" if o.dtype == "e4m3" else DTYPES[o.dtype]
    q = _tensor("q_index", o.queries, o.heads, 128, dtype=dtype)
    k = _tensor("k_index", o.keys, 128, dtype=dtype)
    return q, k, _tensor("weights", o.queries, o.heads, dtype=_sums(o))


def _scores(o: Given) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (*_index(o), _ids("indices", o.queries, o.topk)), _lengths(o)


def _index_backward(o: Given) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (*operands, indices), more = _scores(o)
    grad = _tensor("grad_scores", o.queries, o.topk, dtype=_sums(o))
    return (*operands, indices, grad), {"deterministic": o.deterministic, **more}


def _prefill(o: Given) -> tuple[tuple[Any, ...], dict[str, Any]]:
    starts = _ids("starts", o.queries) if o.starts else None
    out = _ids("topk_indices", o.queries, o.topk)
    more: dict[str, Any] = {"sorted": o.sorted, "block": o.block}
    if o.dtype == "e4m3":
        more["k_scale"] = _tensor("k_scale", o.keys, dtype="float32")
    if o.candidates:
        more["candidates"] = _ids("candidates", o.queries, o.candidates)
    return (*_index(o), starts, _ids("ends", o.queries), out), more


def _indexer(o: Given) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from flashdsa.problem import INDEX_TOKEN_BYTES, MXFP4_TOKEN_BYTES, PAGE_SIZE

    pages, of_token = -(-o.tokens // PAGE_SIZE), MXFP4_TOKEN_BYTES if o.mxfp4 else INDEX_TOKEN_BYTES
    rows = (o.requests, o.next_n)
    more: dict[str, Any] = {"sorted": o.sorted, "ids": o.ids, "block": o.block}
    more["table_page_size"] = o.table_page_size
    if o.candidates:
        more["candidates"] = _ids("candidates", *rows, o.candidates)
    operands = (
        _tensor("q_index_fp8", *rows, o.heads, 128, dtype="float8_e4m3fn"),
        _tensor("k_index_cache_fp8", pages, PAGE_SIZE, 1, of_token, dtype="uint8"),
        _tensor("weights", *rows, o.heads, dtype="float32"),
        _ids("seq_lens", *rows),
        _ids("block_table", o.requests, -(-o.tokens // o.table_page_size)),
        _ids("topk_indices", *rows, o.topk),
    )
    return operands, more


_command(
    "sparse_mla",
    """The forward of sparse MLA: prefill and decode.

    \b
    Examples
      flashdsa choose sparse_mla --queries 64 --keys 8192 --format v32
      flashdsa choose sparse_mla --queries 4096 --heads 16 --lengths
      flashdsa choose sparse_mla --d-qk 512 --extra-keys 16384 --extra-range
      flashdsa choose sparse_mla --backend triton --gpu a100
    """,
    _forward,
    (*_ATTENTION, *_SOURCES, *_PACKED),
)
_command(
    "mla_bwd",
    """The backward of sparse MLA: its parts, one after another.

    The device chooses in the call where a part names kernels with "or".

    \b
    Examples
      flashdsa choose mla_bwd --heads 64 --topk 512
      flashdsa choose mla_bwd --queries 8192 --keys 400000 --deterministic
    """,
    _backward,
    (*_ATTENTION, *_SOURCES, _DETERMINISTIC),
)
_command(
    "dsa_topk_indexer",
    """The fused indexer over a paged cache.

    \b
    Examples
      flashdsa choose dsa_topk_indexer --requests 1 --tokens 1000000
      flashdsa choose dsa_topk_indexer --next-n 2
    """,
    _indexer,
    (
        _size("--requests", 32, "Rows of the block table."),
        _size("--next-n", 1, "Queries of a request."),
        _INDEX_HEADS,
        _size("--tokens", 65536, "That a row of the block table has room for."),
        _size("--topk", 2048, "Ids of a query."),
        _SORTED,
        click.option("--ids", type=click.Choice(("slot", "position")), default="slot"),
        _size("--table-page-size", 64, "Tokens that an entry of the block table names."),
        _BLOCK,
        _CANDIDATES,
        _flag("--mxfp4", "Keys of 68 bytes."),
    ),
)
_command(
    "dsa_topk_prefill",
    """The indexer of many queries over shared keys.

    \b
    Examples
      flashdsa choose dsa_topk_prefill --queries 8192 --keys 8192
      flashdsa choose dsa_topk_prefill --dtype bf16 --starts --backend triton
    """,
    _prefill,
    (
        _size("--queries", 4096, "Rows of q_index."),
        _size("--keys", 65536, "Rows of k_index."),
        _INDEX_HEADS,
        _size("--topk", 2048, "Ids of a query."),
        click.option("--dtype", type=click.Choice(("e4m3", "bf16", "fp16", "fp32")),
                     default="e4m3", show_default=True, help="Of q_index."),
        _flag("--starts", "Ranges begin elsewhere than at row 0: several documents."),
        _SORTED,
        _BLOCK,
        _CANDIDATES,
    ),
)  # fmt: skip
_command(
    "attention_target",
    """The attention's weights, which the indexer learns.

    \b
    Examples
      flashdsa choose attention_target --heads 64 --d-qk 512
    """,
    _target,
    _ATTENTION,
)
_command(
    "indexer_scores",
    """The indexer's scores at given slots.

    \b
    Examples
      flashdsa choose indexer_scores --queries 100
    """,
    _scores,
    (*_LISTS, _INDEX_HEADS, _DTYPE),
)
_command(
    "indexer_bwd",
    """The backward of the indexer's scores.

    \b
    Examples
      flashdsa choose indexer_bwd --deterministic
    """,
    _index_backward,
    (*_LISTS, _INDEX_HEADS, _DTYPE, _DETERMINISTIC),
)
