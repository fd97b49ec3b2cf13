"""Errors planted in the operations: `flashdsa check` has a case that sees each of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

from flashdsa.backends import registry
from flashdsa.errors import ArgumentValueError
from flashdsa.ops import OPERATIONS
from flashdsa.verify.check_list import Check, checks_of
from flashdsa.verify.compare import failures

ATTENTION = "flashdsa.backends.cpu.sparse_mla"
INDEXER, TOPK = "flashdsa.backends.cpu.indexer", "flashdsa.backends.cpu.topk"
GATHER = "flashdsa.backends.cpu.gather"
TRAINING = "flashdsa.backends.cpu.indexer_training"
PACKED = "flashdsa.backends.packed_rows"
MXFP4 = "flashdsa.backends.mxfp4"
MERGE = "flashdsa.ops.merge"
KV_CACHE = "flashdsa.ops.kv_cache"
WARM_UP = "flashdsa.ops.indexer_loss_dense"
ENTRIES, PLACES = "flashdsa.backends.cpu.entries", "flashdsa.backends.entries"
OPS_ENTRIES, CSA = "flashdsa.ops.entries", "CSA, 5 sequences"
USERS = (
    *("flashdsa", "flashdsa.ops", GATHER, ATTENTION),
    *(KV_CACHE, ENTRIES, OPS_ENTRIES, INDEXER, TOPK),
)
"""Modules that import what is replaced by its name."""
END = ").to(q.dtype)\n    dkv"
"""Of the backward."""
BLOCKS, TWO, POOLS = "3000 slots: several key blocks", "two sources", "pools of 4 and a tail"

# fmt: off
MUTATIONS = {
    # module, function, what is there, what stands there instead, operation, case
    "O is not rescaled at a key block": (
        ATTENTION, "_attend", "acc.mul_(rescale[..., None].to(q.dtype)).", "acc.",
        "sparse_mla_fwd", BLOCKS),
    "the sum is not rescaled at a key block": (
        ATTENTION, "_attend", "row_sum * rescale +", "row_sum +", "sparse_mla_fwd", BLOCKS),
    "the sum begins anew at a key block": (
        ATTENTION, "_attend", "row_sum * rescale + p", "p", "sparse_mla_fwd", BLOCKS),
    "max_logits are 1 % too large": (
        ATTENTION, "forward_out", "max_logits[rows] = row_max", "max_logits[rows] = row_max * 1.01",
        "sparse_mla_fwd", "largest logits"),
    "packed scales are of the next group": (
        PACKED, "unpack", "scale.to(wide)[..., None]", "scale.to(wide).roll(1, -1)[..., None]",
        "sparse_mla_fwd", "packed rows"),
    "the buffers' lse is not written": (
        ATTENTION, "forward_out", "lse[rows] = tile_lse.masked_fill(empty, math.inf)", "pass",
        "sparse_mla_fwd_out", "buffers of the caller"),
    "a row of dKV is 1 % too long": (
        ATTENTION, "backward", END, END.replace("dkv", "of_sources[0][3] *= 1.01; dkv"), "mla_bwd",
        "in order, 32 heads"),
    "a row of dQ is 1 % too short": (
        ATTENTION, "backward", END, END.replace("dkv", "dq[2, 5] *= 0.99; dkv"), "mla_bwd",
        "in order, 32 heads"),
    "a row of O is 1 % too long": (
        ATTENTION, "forward_out", "out[rows] = acc.to(q.dtype)",
        "acc[0, 3] *= 1.01; out[rows] = acc.to(q.dtype)", "sparse_mla_fwd", "packed rows"),
    "topk_length is off by one": (
        GATHER, "gather_rows", "slots < topk_length", "slots <= topk_length",
        "sparse_mla_fwd", "packed rows"),
    "the second source is forgotten": (
        GATHER, "row_lists", "if x.extra_kv is not None", "if False", "sparse_mla_fwd", TWO),
    "its gradient is forgotten": (
        ATTENTION, "backward", "(*of_sources, d_sink.new_empty(0))[:2]",
        "of_sources[0], of_sources[-1].mul(0)", "mla_bwd", TWO),
    "its rows are kv's": (
        GATHER, "row_lists", "_row_list(x.extra_kv, *extra", "_row_list(x.kv, *extra",
        "sparse_mla_fwd", "40 rows and a window"),
    "its lengths are those of kv's list": (
        GATHER, "row_lists", "x.extra_topk_length, x", "x.topk_length, x", "sparse_mla_fwd", TWO),
    "a list begins the softmax anew": (
        ATTENTION, "_attend", "row_max, row_sum, empty", "new_max, p.sum(-1), empty",
        "sparse_mla_fwd", TWO),
    "a range has its end, too": (
        GATHER, "_row_list", "ends.clamp(0, count)", "(ends + 1).clamp(0, count)",
        "sparse_mla_fwd", "two ranges"),
    "a range ends one row early": (
        GATHER, "_row_list", "(ends.clamp(0, count) -", "(ends.clamp(0, count) - 1 -",
        "sparse_mla_fwd", "40 rows and a window"),
    "a start outside is the first row": (
        GATHER, "_row_list", "indices.long().clamp(0, count)", "indices.long() % count",
        "sparse_mla_fwd", "two ranges"),
    "an id is not multiplied by its block": (
        GATHER, "RowList", "ids * self.step +", "ids +", "sparse_mla_fwd", POOLS),
    "an id times its block wraps": (
        GATHER, "_row_list", "return RowList(kv, indices, topk_length, indices",
        "indices = (indices * block) // block; return RowList(kv, indices, topk_length, indices",
        "sparse_mla_fwd", POOLS),
    "lengths count rows of blocks": (
        GATHER, "_row_list", "topk_length.long() * block", "topk_length.long()",
        "sparse_mla_fwd", POOLS),
    "a request's row of the table is the query's": (
        INDEXER, "_scored", "device=lengths.device) // next_n",
        "device=lengths.device).clamp(max=len(x.block_table) - 1)", "dsa_topk_indexer",
        "2 queries a request"),
    "positions are slots": (
        INDEXER, "topk_indexer", "if not positions and", "if", "dsa_topk_indexer", "positions"),
    "the target has no sink": (
        TRAINING, "attention_target", "if attn_sink is not None", "if False", "attention_target",
        "sink, 8 heads"),
    "the loss's target has no sink": (
        TRAINING, "attention_target", "if attn_sink is not None", "if False", "indexer_kl_loss",
        "sink, 8 heads"),
    "a part without a key counts": (
        MERGE, "merge_attention", "logs == math.inf, -math.inf", "logs == math.inf, 0.0",
        "merge_attention", "3 parts, bf16"),
    "what a part without a key holds counts": (
        MERGE, "merge_attention", "part.masked_fill((weight == 0)[..., None], 0)",
        "part", "merge_attention", "3 parts, bf16"),
    "padding is written into the last slot": (
        PACKED, "put", "valid = (slots >= 0) &", "valid = (slots >= -1) &",
        "write_kv_cache", "50 rows, some padding"),
    "the newest block must win its place": (
        TOPK, "choose", "& selectable, math.inf", "& selectable, 0.0", "dsa_topk_indexer",
        "blocks of 8, ties, NaN keys"),
    "a NaN is its block's best": (
        TOPK, "block_scores", ".masked_fill(missing, -math.inf)", "", "dsa_topk_indexer",
        "blocks of 8, ties, NaN keys"),
    "a token beside its candidate": (
        TOPK, "among", "(block, dim=1)", "(block, dim=1).roll(1, 1)",
        "dsa_topk_indexer", "candidates of 8, sorted, 2 queries a request"),
    "a key of 68 bytes has the first group's scale": (
        MXFP4, "as_e4m3", "exponents.amax(1)", "exponents[:, 0]", "indexer_logits",
        "keys of 68 bytes"),
    "a page's offset is the next one": (
        PACKED, "take", "slots % kv.shape[1]", "(slots + 1) % kv.shape[1]",
        "read_kv_cache", "60 slots"),
    "the even column is in the high half": (
        PACKED, "e2m1_values", "[codes & 15, codes >> 4]", "[codes >> 4, codes & 15]",
        "read_kv_cache", "60 slots"),
    "a split page is joined": (
        PACKED, "parts_of", "not form.split", "True", "write_kv_cache", "50 rows, some padding"),
    "a small group's scale is the other writer's": (
        PACKED, "_scales", "else MIN_AMAX)", "else MIN_AMAX / E4M3_MAX)",
        "quantize_kv", "300 rows of any size"),
    "a scale is not rounded up to a power of two": (
        PACKED, "next_power_of_two", "+ (2**23 - 1)", "+ 0",
        "quantize_kv", "300 rows of any size"),
    "the loss sees keys before the range": (
        WARM_UP, "indexer_kl_loss_dense", "key_end, key_start, row_weight",
        "key_end, None, row_weight", "indexer_kl_loss_dense", "9 queries of 80 keys, bf16"),
    "a chunk of the loss counts twice in a gradient": (
        WARM_UP, "_gradients", "dk.addmm_(a.T, _finite(q))",
        "dk.addmm_(a.T, _finite(q), alpha=1 + (rows.start == 2))", "indexer_kl_loss_dense",
        "9 queries of 80 keys, fp32"),
    "a query sees one key more": (
        "flashdsa.ops.prefill", "causal_ranges", "- query - 1", "- query - 2", "causal_ranges",
        "5 sequences, one empty"),
    "a query sees the entry that its window will be": (
        "flashdsa.ops.prefill", "causal_ranges", ".clamp(min=0) // ratio",
        ".clamp(min=0).add(ratio - 1) // ratio", "causal_ranges", "5 sequences, one empty"),
    "a complete block has a tail, too": (
        "flashdsa.ops.blocks", "expand_blocks", "(own + 1) // block", "own // block",
        "expand_blocks", "12 queries"),
    "base 2 is base e": (
        "flashdsa.ops.merge", "lse_to_base2", "/ math.log(2)", "", "lse_to_base2",
        "8 x 16, infinities"),
    "both halves are of an entry's own window": (
        ENTRIES, "_chunks", "((-ratio, slice(0, d))", "((0, slice(0, d))", "compress_kv", CSA),
    "the first entry has a window before it": (
        ENTRIES, "_chunks", "(position >= 0)", "(position >= -ratio)", "compress_kv", CSA),
    "the halves' biases are swapped": (
        ENTRIES, "_chunks", "for half in halves]).to", "for half in halves[::-1]]).to",
        "compress_kv", CSA),
    "an entry is rotated by its number": (
        ENTRIES, "_tables", "number * ratio", "number", "compress_kv", CSA),
    "an entry is rotated the other way": (
        PLACES, "rotated", "-sin if inverse else sin", "sin if inverse else -sin",
        "compress_kv", CSA),
    "windows go on from sequence to sequence": (
        PLACES, "places", "(before + lengths) // ratio - first",
        "(before + lengths + begins) // ratio - (before + begins) // ratio", "compress_kv", CSA),
    "the state's rows are those of the next token": (
        ENTRIES, "_gathered", "half.position %", "(half.position + 1) %", "compress_kv", CSA),
    "the state keeps older tokens": (
        "flashdsa.ops.entries_kept", "keep_last", "ends[sequence] - 1 - row",
        "ends[sequence] - 2 - row", "compress_kv", CSA),
    "the norm's mean has no gradient": (
        ENTRIES, "backward", "r * (dn - e * r * r *", "r * (dn - 0 * e * r * r *",
        "compress_kv_bwd", "V4.1, ratio 2"),
    "a gate's gradient forgets the entry": (
        ENTRIES, "backward", "(chunk.kv - e[:, None])", "chunk.kv", "compress_kv_bwd", CSA),
    "a row of a gradient is 1 % too long": (
        ENTRIES, "backward", "d_ape, d_weight = (", "d_gate[14] *= 1.01; d_ape, d_weight = (",
        "compress_kv_bwd", CSA),
    "an entry is left out of ape's gradient": (
        ENTRIES, "backward", "of_gate[:, slots].sum(0)", "of_gate[1:, slots].sum(0)",
        "compress_kv_bwd", "CSA index keys"),
    "a turned column has no gradient": (
        PLACES, "rotated", "+ b * cos", "+ b.detach() * cos", "rotate_tail",
        "7 rows of 3 heads, bf16"),
}
# fmt: on


@pytest.fixture(scope="module")
def checks() -> dict[tuple[str, str], Check]:
    """Of the CPU, by operation and case."""
    return {(check.operation, check.case): check for check in checks_of(3, "cpu", "cpu")}


def forget() -> None:
    """No call is served by a function that was found before."""
    registry._load.cache_clear()
    for spec in OPERATIONS.values():
        spec.cache.clear()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Replaces a part of a function's source; at the end the function is what it was."""

    def replace_in(name: str, function: str, old: str, new: str) -> None:
        module: ModuleType = import_module(name)
        right = getattr(module, function)
        source = inspect.getsource(right)
        assert source.count(old) == 1, f"{name}.{function} has no single {old!r}: mend the mutation"
        monkeypatch.setattr(module, function, right)
        exec(compile(source.replace(old, new), name, "exec"), module.__dict__)
        for other in map(import_module, USERS):
            if vars(other).get(function) is right:
                monkeypatch.setattr(other, function, getattr(module, function))
        forget()

    yield replace_in
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_error_is_seen(name, plant, checks):
    *where, operation, case = MUTATIONS[name]
    check = checks[operation, case]
    assert failures(check.judge()) == []
    plant(*where)
    try:
        seen = failures(check.judge())
    except ArgumentValueError as error:  # the CPU's own checks see a table's row that is not its
        seen = [str(error)]
    assert seen
