"""Every tensor of every operation as a view into a larger buffer: the result of the call without
gaps, and nothing written beside the view; or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.emulated.runner import emulation
from flashdsa.errors import UnsupportedError
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs
from flashdsa.verify.layouts import pages_apart, strided_copy
from tests.support.hopper_gpu import HOPPER_GPU
from workbench.public_calls import Call, public_calls

Arguments = dict[str, Any]
View = Callable[[Tensor], Tensor]

INDEXER_CASES = {
    "rows": IndexerCase("", (530, 0), 512, 16),
    "requests": IndexerCase("", (529, 530, 0, 70), 512, 16, next_n=2),
    "68 bytes": IndexerCase("", (300, 70), 90, 16, mxfp4=True),
    "blocks": IndexerCase("", (300, 65), 20, 16, block=8),
    "candidates": IndexerCase("", (300, 65), 70, 16, block=8, num_candidates=20),
    "slots": IndexerCase("", (600, 530), 512, 64, table_page_size=1),
}


def indexer_calls() -> Iterator[tuple[str, Call]]:
    """The indexer's forms."""
    for name, case in INDEXER_CASES.items():
        x = make_indexer_inputs(case, seed=1)
        rows: Arguments = {
            "q_index_fp8": x.of_requests(x.q),
            "k_index_cache_fp8": x.cache,
            "weights": x.of_requests(x.weights),
            "seq_lens": x.of_requests(x.seq_lens),
            "block_table": x.block_table,
            "table_page_size": case.table_page_size,
        }
        chosen = {"topk_indices": x.of_requests(x.output_buffer()), "block": case.block}
        if x.candidates is not None:
            chosen["candidates"] = x.candidates
        select = flashdsa.dsa_topk_indexer
        yield f"dsa_topk_indexer, {name}", Call(select, {**rows, **chosen}, ("topk_indices",))
        if case.block == case.next_n == 1:
            scored = {**rows, "max_len": x.max_len}
            yield f"indexer_logits, {name}", Call(flashdsa.indexer_logits, scored)


def paged_calls() -> Iterator[tuple[str, Call]]:
    """Attention over pages, and their writing and reading."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(3 * 64, 512, generator=generator).bfloat16()
    q = torch.randn(3, 64, 512, generator=generator).bfloat16()
    ids = torch.randint(len(rows), (3, 70), generator=generator, dtype=torch.int32)
    pages = rows.view(3, 64, 1, 512)
    yield (
        "sparse_mla_fwd, pages",
        Call(flashdsa.sparse_mla_fwd, {"q": q, "kv": pages, "indices": ids}),
    )
    for form, width in {"v32_no_rope": 528, "v4": 584}.items():
        cache = torch.zeros(3, 64, 1, width, dtype=torch.uint8)
        slots = torch.randperm(len(rows), generator=generator).int()
        written = {"kv": rows, "slots": slots, "cache": cache, "kv_format": form}
        flashdsa.write_kv_cache(**written)
        yield f"write_kv_cache, {form}", Call(flashdsa.write_kv_cache, written, ("cache",))
        read = {"cache": cache, "slots": slots, "kv_format": form}
        yield f"read_kv_cache, {form}", Call(flashdsa.read_kv_cache, read)
        attend = {"q": q, "kv": cache, "indices": ids, "kv_format": form}
        yield f"sparse_mla_fwd, {form}", Call(flashdsa.sparse_mla_fwd, attend)


CALLS = {**public_calls("cpu"), **dict(indexer_calls()), **dict(paged_calls())}
GAPS_IN_A_PAGE = "expected each page's bytes to be contiguous"
GAPS_IN_A_BUFFER = "expected a contiguous tensor to write to"


def refusal(name: str, argument: str, kind: str) -> str:
    """What docs/concepts/dsa.md says is refused of a call: the beginning of the message's reason;
    "" if nothing is."""
    caches = ("k_index_cache_fp8", "cache" * ("index_k_cache" in name), "out" * ("kv" in name))
    if argument in caches:
        return GAPS_IN_A_PAGE * (kind == "rows apart")
    if argument in ("out", "lse") and "fwd" in name:
        return GAPS_IN_A_BUFFER
    if argument == "topk_indices" and name.endswith("requests"):
        return "expected the queries of all requests at one distance"
    if argument == "kv" and name.endswith("pages"):
        return "expected pages that follow each other in memory"
    cache = "kv" if "mla" in name else "cache"
    if argument == cache and name.endswith("v4") and kind == "rows apart":
        return "expected pages without gaps inside"
    return ""


def of_any_dtype(view: View, x: Tensor) -> Tensor:
    """`view`, and of e4m3, which torch does not fill."""
    return view(x) if x.dtype != torch.float8_e4m3fn else view(x.view(torch.uint8)).view(x.dtype)


def views(x: Tensor) -> Iterator[tuple[str, View]]:
    """Ways to lie in a larger buffer, in whose middle the first element is."""
    if x.dim() and x.numel():
        yield "rows apart", partial(of_any_dtype, strided_copy)
        if x.dim() == 1:
            yield "elements apart", lambda x: strided_copy(x[:, None])[:, 0]
        if x.dim() > 2:
            yield "pages apart", partial(of_any_dtype, pages_apart)


def tensors_of(call: Call) -> Iterator[tuple[str, int, Tensor]]:
    """(argument, its number if it is a pair, tensor)."""
    for name, value in call.arguments.items():
        for number, one in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(one, Tensor):
                yield name, number, one


def moved(arguments: Arguments, name: str, number: int, view: View) -> None:
    """Move one tensor elsewhere."""
    given = arguments[name]
    if isinstance(given, Tensor):
        arguments[name] = view(given)
    else:
        arguments[name] = tuple(view(x) if n == number else x for n, x in enumerate(given))


def results(call: Call, arguments: Arguments, **options: Any) -> list[Tensor]:
    """The bytes of what the call returns, then of what it writes."""
    given = call.function(**arguments, **options)
    returned = [given] if isinstance(given, Tensor) else list(given or ())
    tensors = [*returned, *(arguments[name] for name in call.written)]
    return [x.detach().contiguous().reshape(-1).view(torch.uint8).clone() for x in tensors]


def beside(x: Tensor) -> Tensor:
    """The buffer that `x` is a view of, as bytes, with zeros in place of `x`."""
    assert x._base is not None
    buffer = x._base.clone()
    buffer.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset()).zero_()
    return buffer.view(torch.uint8)


@pytest.mark.parametrize("name", CALLS)
def test_a_view_gives_the_result_of_a_copy_or_is_refused(name: str) -> None:
    """One tensor after the other on the CPU; in a new call, and in one like it."""
    call = CALLS[name]
    expected = results(call, deepcopy(call.arguments))
    for argument, number, tensor in tensors_of(call):
        for kind, view in views(tensor):
            message = refusal(name, argument, kind)
            for _ in range(2):
                arguments = deepcopy(call.arguments)
                moved(arguments, argument, number, view)
                if message:
                    with pytest.raises(ValueError, match=f"^{argument}: {message}"):
                        call.function(**arguments)
                    continue
                around = beside(arguments[argument]) if argument in call.written else None
                got = results(call, arguments)
                assert all(map(torch.equal, got, expected)), (argument, kind)
                assert around is None or torch.equal(beside(arguments[argument]), around)


QUICK = {
    "emulate-sm90": [
        *(f"dsa_topk_indexer, {case}" for case in ("rows", "requests", "68 bytes", "blocks")),
        *("indexer_logits, rows", "write_index_k_cache"),
    ],
    "emulate-sm100": ["dsa_topk_indexer, rows", "indexer_logits, rows", "indexer_logits, slots"],
}
"""A call of each family of the indexer's kernels."""


def kernels_calls() -> Iterator[Any]:
    """(backend, name) of each operation that has kernels."""
    served = {(one.backend, one.operation) for one in registry.implementations()}
    for backend, name in product((*QUICK, "sm90"), CALLS):
        operation = name.partition(", ")[0]
        if name.endswith(("sorted", "deterministic")) if backend in QUICK else "_bwd" in operation:
            continue  # as the other forms, and slow; of other bits in each call
        if (backend, operation) in served:
            marks = () if name in QUICK.get(backend, CALLS) else pytest.mark.slow
            marks = marks if backend in QUICK else HOPPER_GPU
            yield pytest.param(backend, name, marks=marks)


def to_device(x: Any, device: str) -> Any:
    """A tensor, a pair of them, or what is none."""
    if isinstance(x, tuple):
        return tuple(one.to(device) for one in x)
    return x.to(device) if isinstance(x, Tensor) else x


def all_moved(name: str, call: Call) -> Arguments:
    """The call's arguments, as views wherever none is refused."""
    arguments = deepcopy(dict(call.arguments))
    for argument, number, tensor in tensors_of(call):
        ways = [view for kind, view in views(tensor) if not refusal(name, argument, kind)]
        if ways:
            moved(arguments, argument, number, ways[-1])
    if name.endswith("slots"):  # Blackwell's gathers count rows of 128 bytes
        cache = call.arguments["k_index_cache_fp8"]
        arguments["k_index_cache_fp8"] = pages_apart(cache, gap=3 * 128)
    return arguments


@pytest.mark.parametrize(("backend", "name"), [*kernels_calls()])
def test_kernels_take_views_of_all_tensors_at_once(backend: str, name: str) -> None:
    device, call = "cpu" if backend in QUICK else "cuda", CALLS[name]
    moved = {n: to_device(x, device) for n, x in call.arguments.items()}
    call = call._replace(arguments=moved)
    with emulation(SMALL):
        try:
            expected = results(call, deepcopy(call.arguments), backend=backend)
        except UnsupportedError as error:
            pytest.skip(str(error))
        got = results(call, all_moved(name, call), backend=backend)
    assert all(map(torch.equal, got, expected))


def test_lengths_in_a_persistent_buffer_are_read_anew_in_every_call() -> None:
    name = "dsa_topk_indexer, requests"
    call, buffer = CALLS[name], torch.zeros(2, 5, dtype=torch.int32)
    for lengths in ([[529, 530], [0, 70]], [[520, 5], [70, 69]], [[0, 513], [64, 65]]):
        buffer[:, :2] = torch.tensor(lengths)
        dense = {**deepcopy(dict(call.arguments)), "seq_lens": buffer[:, :2].contiguous()}
        got = results(call, {**deepcopy(dict(call.arguments)), "seq_lens": buffer[:, :2]})
        assert all(map(torch.equal, got, results(call, dense)))


@pytest.mark.parametrize("backend", ["cpu", *QUICK])
def test_pages_of_records_beyond_2_gb_are_read(backend: str) -> None:
    arguments = dict(CALLS["indexer_logits, rows"].arguments)
    cache, table = arguments["k_index_cache_fp8"], arguments["block_table"]
    before, record = 1995, 1_077_120
    buffer = torch.empty((before + len(cache)) * record, dtype=torch.uint8)
    sizes, strides = (before + len(cache), *cache.shape[1:]), (record, *cache.stride()[1:])
    records = buffer.as_strided(sizes, strides)
    records[before:] = cache
    far = {"k_index_cache_fp8": records, "block_table": table + before}
    with emulation(SMALL):
        expected = flashdsa.indexer_logits(**arguments, backend=backend)
        got = flashdsa.indexer_logits(**{**arguments, **far}, backend=backend)
    assert torch.equal(got, expected)
