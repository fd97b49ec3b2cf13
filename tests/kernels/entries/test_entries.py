"""`compress_kv` and `rotate_tail`: worked examples, every case, chunks, caches, errors."""

import math
import re
from itertools import pairwise

import pytest
import torch

import flashdsa
from flashdsa import reference
from flashdsa.backends.cpu import entries as cpu
from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from flashdsa.row_formats import ROW_FORMATS
from flashdsa.verify.compare import failures
from flashdsa.verify.entries_cases import ENTRIES_CASES, EntriesCase, make_entries_inputs
from flashdsa.verify.judge_entries import check_backward, check_forward, check_rotation

F64 = {"dtype": torch.float64}
CSA = EntriesCase("CSA", (61, 130, 3, 40), 4, 128, overlap=True)
HCA = EntriesCase("HCA", (300, 129), 128, 64)


@pytest.mark.parametrize("case", ENTRIES_CASES, ids=lambda case: case.name)
def test_every_element_is_the_references(case, backend, seed, device):
    inputs = make_entries_inputs(case, seed, device)
    assert failures([*check_forward(inputs, backend), *check_backward(inputs, backend)]) == []


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 127, 128, 129, 255, 256])
@pytest.mark.parametrize("ratio", [4, 128])
def test_lengths_around_windows(length, ratio, seed):
    case = EntriesCase("length", (length, 2), ratio, 8, overlap=ratio == 4, rotated=4)
    inputs = make_entries_inputs(case, seed)
    assert failures([*check_forward(inputs, "cpu"), *check_backward(inputs, "cpu")]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_rotation_is_the_references(dtype, seed):
    assert failures(check_rotation(dtype, seed, "cpu")) == []


def test_two_windows_that_overlap():
    """Weights of entry 1: 1 and 3 of Ca's tokens, 1 each of Cb's."""
    kv = torch.tensor([[1.0, 10], [2, 20], [3, 30], [4, 40]], **F64).requires_grad_()
    gate, ape = torch.zeros(4, 2, **F64), torch.zeros(2, 2, **F64)
    ape[1, 0] = math.log(3)
    ape.requires_grad_()
    entries = flashdsa.compress_kv(kv, gate, ape, ratio=2, overlap=True)
    expected = torch.tensor([[15.0], [77 / 6]], **F64)
    torch.testing.assert_close(entries.detach(), expected)
    found = reference.compress_kv(kv, gate, ape, ratio=2, overlap=True, cu_seqlens=[0, 4])
    torch.testing.assert_close(found[0], expected)
    entries[1].sum().backward()
    d_kv = torch.tensor([[1.0, 0], [3, 0], [0, 1], [0, 1]], **F64) / 6
    torch.testing.assert_close(kv.grad, d_kv)
    torch.testing.assert_close(ape.grad[1, 0], torch.tensor(0.5 * (2 - 77 / 6), **F64))


def test_a_pair_is_turned_and_turned_back():
    rotation = torch.zeros(2, 1), torch.tensor([[0.0], [1.0]])
    x, at = torch.tensor([[7.0, 3, 4]]), torch.tensor([1])
    turned = flashdsa.rotate_tail(x, at, rotation)
    assert turned.tolist() == [[7, -4, 3]]
    assert flashdsa.rotate_tail(turned, at, rotation, inverse=True).tolist() == x.tolist()


def test_the_output_at_a_keys_own_position_is_the_key_before_its_rotation(seed):
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(1, 16, generator=generator)
    angles = 6 * torch.rand(9, 4, generator=generator)
    rotation, at = (angles.cos(), angles.sin()), torch.tensor([8])
    rows = flashdsa.rotate_tail(key, at, rotation)
    q = torch.randn(1, 2, 16, generator=generator)
    out, _ = flashdsa.sparse_mla_fwd(q, rows, torch.zeros(1, 1, dtype=torch.int32), d_v=16)
    found = flashdsa.rotate_tail(out, at, rotation, inverse=True)
    torch.testing.assert_close(found, key[:, None].expand(1, 2, 16))


def test_the_references_gradients_are_those_of_autograd(seed):
    """The formulas, against finite differences of the operation in float64."""
    inputs = make_entries_inputs(
        EntriesCase("fp64", (9, 3), 4, 6, overlap=True, rotated=4, dtype=torch.float64), seed
    )
    leaves = [x.nan_to_num().requires_grad_() for x in (*inputs.operands, inputs.norm_weight)]

    def f(kv, gate, ape, weight):
        options = {**inputs.options, "norm_weight": weight}
        return flashdsa.compress_kv(kv, gate, ape, cu_seqlens=inputs.cu_seqlens, **options)

    assert torch.autograd.gradcheck(f, leaves)


def call(inputs, **options):
    return flashdsa.compress_kv(
        *inputs.operands, cu_seqlens=inputs.cu_seqlens, **inputs.options, **options
    )


@pytest.mark.parametrize("case", [CSA, HCA], ids=["CSA", "HCA"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 127, 128, 129])
def test_chunks_of_a_sequence_have_the_bits_of_the_whole(case, chunk, seed):
    inputs = make_entries_inputs(case, seed)
    whole = call(inputs)
    rows = case.ratio * (1 + case.overlap)
    first = entry = 0
    for length in case.lengths:
        state = torch.full((1, rows, 2, inputs.kv.shape[1]), math.nan, dtype=torch.bfloat16)
        for seen in range(0, length, chunk):
            tokens = slice(first + seen, first + min(seen + chunk, length))
            found = flashdsa.compress_kv(
                inputs.kv[tokens], inputs.gate[tokens], inputs.ape, **inputs.options,
                state=state, seen=torch.tensor([seen]),
            )  # fmt: skip
            count = min(seen + chunk, length) // case.ratio - seen // case.ratio
            assert torch.equal(found[:count], whole[entry : entry + count])
            assert not found[count:].any()
            entry += count
        first += length
    assert not whole[entry:].any()


@pytest.mark.parametrize("case", [CSA, HCA], ids=["CSA", "HCA"])
def test_parts_of_bounded_memory_have_the_bits_of_the_whole(case, seed, monkeypatch):
    inputs = make_entries_inputs(case, seed)
    options = {"cu_seqlens": inputs.cu_seqlens, **inputs.options}
    whole = flashdsa.compress_kv_bwd(
        *inputs.operands[:2], inputs.grad_entries, inputs.ape, **options
    )
    entries = call(inputs)
    monkeypatch.setattr(cpu, "WORKSPACE_BYTES", 6 * 4 * case.ratio * inputs.kv.shape[1] * 3)
    assert torch.equal(call(inputs), entries)
    parts = flashdsa.compress_kv_bwd(
        *inputs.operands[:2], inputs.grad_entries, inputs.ape, **options
    )
    assert torch.equal(parts[0], whole[0]) and torch.equal(parts[1], whole[1])
    torch.testing.assert_close(parts[2:], whole[2:])


def test_memory_is_bounded(seed):
    tokens = 20_000
    kv = torch.zeros(tokens, 1024, dtype=torch.bfloat16)
    peak = []
    original = cpu._gathered

    def measured(*given):
        part = original(*given)
        peak.append(part.numel() * 4)
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_gathered", measured)
        flashdsa.compress_kv(kv, kv, ratio=4, overlap=True)
    assert len(peak) > 2 and max(peak) * 6 <= cpu.WORKSPACE_BYTES


def test_a_sequence_has_its_bits_anywhere_in_a_batch(seed):
    inputs = make_entries_inputs(CSA, seed)
    whole = call(inputs)
    offsets, entry = inputs.cu_seqlens.tolist(), 0
    for first, end in pairwise(offsets):
        alone = flashdsa.compress_kv(
            inputs.kv[first:end], inputs.gate[first:end], inputs.ape, **inputs.options
        )
        assert torch.equal(alone, whole[entry : entry + len(alone)])
        entry += len(alone)


def test_tokens_may_be_taken_back(seed):
    """A draft of 3 tokens after 9, of which none stays: a ring with 3 rows more holds enough."""
    inputs = make_entries_inputs(EntriesCase("16", (16,), 4, 8, overlap=True, rotated=4), seed)
    kv, gate = (x.nan_to_num() for x in inputs.operands[:2])
    whole = flashdsa.compress_kv(kv, gate, inputs.ape, **inputs.options)
    state = torch.full((1, 11, 2, 16), math.nan, dtype=torch.bfloat16)

    def step(first, end, wrong=False):
        given = kv[first:end] + 1 if wrong else kv[first:end]
        return flashdsa.compress_kv(
            given, gate[first:end], inputs.ape, **inputs.options, state=state,
            seen=torch.tensor([first]),
        )  # fmt: skip

    step(0, 9)
    step(9, 12, wrong=True)
    assert torch.equal(step(9, 12)[0], whole[2])
    assert torch.equal(step(12, 16)[0], whole[3])


@pytest.mark.parametrize("form", [None, *ROW_FORMATS])
def test_entries_go_into_caches_of_every_form(form, seed):
    """As `write_kv_cache` writes them; slots of tokens that complete nothing are not looked at."""
    d = 576 if form == "v32" else 512
    inputs = make_entries_inputs(EntriesCase("cache", (9, 6, 4), 4, d, overlap=True), seed)
    entries = call(inputs)
    row = d if form is None else ROW_FORMATS[form].row_bytes
    dtype = torch.bfloat16 if form is None else torch.uint8
    caches = [torch.zeros(2, 64, 1, row, dtype=dtype) for _ in range(2)]
    slots = torch.full((19,), 99_999)
    slots[[3, 7, 12, 18]] = places = torch.tensor([70, 5, -1, 127])
    found = call(inputs, out=caches[0], slots=slots, kv_format=form)
    assert found is None
    flashdsa.write_kv_cache(entries, places, caches[1], kv_format=form)
    assert torch.equal(*caches) and caches[0].any()


def test_pooled_keys_go_into_the_index_cache(seed):
    inputs = make_entries_inputs(EntriesCase("pools", (9, 6), 4, 128, norm=False, rotated=0), seed)
    caches = [torch.zeros(2, 64, 1, 132, dtype=torch.uint8) for _ in range(2)]
    slots = torch.arange(15, dtype=torch.int32) + 60
    call(inputs, out=caches[0], slots=slots)
    flashdsa.write_index_k_cache(call(inputs), slots[[3, 7, 12]], caches[1])
    assert torch.equal(*caches)


@pytest.mark.parametrize("lengths", [(9,), (9, 6)])
def test_a_padded_batch_goes_into_the_cache_and_the_state_as_its_sequences_do(lengths, seed):
    """Padding completes nothing, whatever its slots; the state does not hold it."""
    case = EntriesCase("padded", lengths, 4, 128, overlap=True, padding=13)
    x = make_entries_inputs(case, seed)
    count = sum(lengths)
    results = []
    for rows in (count, case.tokens):
        cache = torch.zeros(1, 64, 1, 132, dtype=torch.uint8)
        state = torch.zeros(len(lengths), 9, 2, 256, dtype=torch.bfloat16)
        flashdsa.compress_kv(
            x.kv[:rows].nan_to_num(), x.gate[:rows].nan_to_num(), x.ape, cu_seqlens=x.cu_seqlens,
            state=state, seen=torch.zeros(len(lengths), dtype=torch.int32), out=cache,
            slots=torch.arange(rows), **x.options,
        )  # fmt: skip
        results.append((cache, state))
    assert torch.equal(results[0][0], results[1][0]) and results[0][0].any()
    assert torch.equal(results[0][1], results[1][1]) and results[0][1].any()


def test_decode_writes_the_entry_that_each_request_completes(seed):
    """A token a request, at positions 2, 3, 7, 8: two of them complete an entry."""
    inputs = make_entries_inputs(EntriesCase("9", (9,) * 4, 4, 8, overlap=True, rotated=4), seed)
    kv, gate = (x.nan_to_num().unflatten(0, (4, 9)) for x in inputs.operands[:2])
    whole = call(inputs).unflatten(0, (-1, 1))[:8].view(4, 2, 8)
    seen = torch.tensor([2, 3, 7, 8], dtype=torch.int32)
    state = torch.full((4, 8, 2, 16), math.nan, dtype=torch.bfloat16)
    for b, count in enumerate(seen.tolist()):
        for t in range(count):
            state[b, t % 8, 0], state[b, t % 8, 1] = kv[b, t], gate[b, t]
    cache = torch.zeros(20, 8, dtype=torch.bfloat16)
    now = [x[torch.arange(4), seen.long()] for x in (kv, gate)]
    flashdsa.compress_kv(
        *now, inputs.ape, **inputs.options, cu_seqlens=torch.arange(5), state=state, seen=seen,
        out=cache, slots=torch.tensor([2, 3, 5, 7]),
    )  # fmt: skip
    assert torch.equal(cache[3], whole[1, 0]) and torch.equal(cache[5], whole[2, 1])
    cache[[3, 5]] = 0
    assert not cache.any()
    assert torch.equal(state[2, 7, 0], kv[2, 7]) and torch.equal(state[3, 0, 1], gate[3, 8])


@pytest.mark.parametrize("tokens", [(3, 0, 5), (40, 1, 9), (0, 0, 1), (14, 9, 2)])
@pytest.mark.parametrize("padding", [0, 3])
def test_the_state_holds_the_newest_tokens(tokens, padding, seed):
    """More and fewer tokens than the state has rows; rows after the last sequence are not kept."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(tokens) + padding
    kv, gate = torch.randn(2, count, 4, generator=generator)
    seen = torch.tensor([5, 2, 0])
    state = torch.randn(3, 7, 2, 4, generator=generator)
    expected, first = state.clone(), 0
    for b, length in enumerate(tokens):
        for t in range(length):
            expected[b, (int(seen[b]) + t) % 7, 0] = kv[first + t]
            expected[b, (int(seen[b]) + t) % 7, 1] = gate[first + t]
        first += length
    offsets = torch.tensor([0, *tokens]).cumsum(0)
    flashdsa.compress_kv(kv, gate, ratio=4, cu_seqlens=offsets, state=state, seen=seen)
    assert torch.equal(state, expected)


X = torch.zeros(8, 16)
OUT = torch.zeros(8, 16, dtype=torch.bfloat16)
TABLE = torch.zeros(1, 4)
STATE = {"state": torch.zeros(1, 4, 2, 16), "seen": torch.tensor([1])}
SLOTS = {"slots": torch.arange(8)}
INDEX_KEYS = torch.zeros(1, 64, 1, 132, dtype=torch.uint8)
WRONG = [
    ({"ratio": 0}, ArgumentValueError, "ratio: expected at least 1"),
    ({"gate": X[:7]}, ArgumentValueError, r"gate: expected shape \[T, columns\]"),
    ({"gate": X.double()}, ArgumentTypeError, "gate: expected dtype float32"),
    ({"ape": X[:3]}, ArgumentValueError, r"ape: expected shape \[ratio, width\] = \[4, 16\]"),
    ({"overlap": 1}, ArgumentTypeError, "overlap: expected a bool"),
    ({"kv": X[:, :15], "gate": X[:, :15], "overlap": True}, ArgumentValueError, "even width"),
    ({"norm_weight": X[0, :8]}, ArgumentValueError, r"norm_weight: expected shape \[d\]"),
    ({"cu_seqlens": torch.tensor([0, 9])}, ArgumentValueError, "the last to be at most T, 8; got"),
    ({"cu_seqlens": torch.tensor([0, 9, 8])}, ArgumentValueError, "offsets that do not decrease"),
    ({"cu_seqlens": torch.tensor([0])}, ArgumentValueError, "cu_seqlens: expected B . 1 offsets"),
    ({"rotation": (TABLE, TABLE)}, ArgumentValueError, "tables of at least 5 positions; got 1"),
    ({"rotation": TABLE}, ArgumentTypeError, r"rotation: expected a pair \(cos, sin\)"),
    ({"rotation": (X, X)}, ArgumentValueError, r"1 <= 2n <= 16"),
    ({"rotation": (X, X, X)}, ArgumentTypeError, r"rotation: .*\(cos, sin\); got 3 values"),
    ({"rotation": (X[:, :4], 3)}, ArgumentTypeError, r"^rotation\[1\]: expected a torch.Tensor"),
    ({"rotation": (X.half(), X)}, ArgumentTypeError, r"^rotation\[0\]: expected dtype float32"),
    ({"rotation": (X, X[:7])}, ArgumentValueError, r"^rotation\[1\]: expected shape \[P, n\]"),
    ({"rotation": (X, torch.zeros(16, 8).T)}, ArgumentValueError, r"^rotation\[1\]: .*last"),
    ({"rotation": (X.to("meta"), X)}, ArgumentValueError, r"^rotation\[0\]: expected device cpu"),
    *(({"eps": eps}, ArgumentValueError, "eps: expected a finite number; got")
      for eps in (math.nan, math.inf, 10**400)),
    *(({"eps": eps}, ArgumentTypeError, "eps: expected a float; got")
      for eps in (1j, True, "x", [1], None)),
    ({"eps": -1.0}, ArgumentValueError, "eps: expected at least 0; got -1.0"),
    ({"state": torch.zeros(1, 4, 2, 16)}, ArgumentValueError, "state: expected it and seen"),
    ({"state": torch.zeros(1, 3, 2, 16), "seen": torch.tensor([1])}, ArgumentValueError, "R >= 4"),
    ({"state": torch.zeros(2, 4, 2, 16), "seen": torch.tensor([1, 1])}, ArgumentValueError, "B se"),
    ({"state": torch.zeros(1, 4, 2, 16), "seen": torch.tensor([-1])}, ArgumentValueError, "seen: "),
    *(({**STATE, name: [1]}, ArgumentTypeError, f"^{name}: expected a torch.Tensor; got list")
      for name in ("kv", "gate", "ape", "norm_weight", "state", "seen")),
    ({**STATE, "state": STATE["state"].clone().requires_grad_()}, UnsupportedError, "^state: "),
    ({"out": OUT}, ArgumentValueError, "slots: expected them and out"),
    ({"kv_format": "v4"}, ArgumentValueError, "^kv_format: expected None without out; got 'v4'"),
    ({"out": INDEX_KEYS, **SLOTS, "kv_format": "v4"}, ArgumentValueError, "^kv_format: .* index"),
    ({"out": [1], **SLOTS}, ArgumentTypeError, "^out: expected a torch.Tensor; got list"),
    ({"out": OUT.half(), **SLOTS}, ArgumentTypeError, "^out: expected dtype bfloat16 or uint8"),
    ({"out": OUT[0], **SLOTS}, ArgumentValueError, r"^out: expected shape \[S_kv, d\]"),
    ({"out": OUT[:, :9], **SLOTS}, ArgumentValueError, r"^out: expected rows of 16 .*; got 9 in"),
    ({"out": OUT.to("meta"), **SLOTS}, ArgumentValueError, "^out: expected device cpu"),
    ({"out": OUT[:1].expand(8, 16), **SLOTS}, ArgumentValueError, "^out: expected an address"),
    ({"out": OUT.byte(), **SLOTS}, ArgumentValueError, "^out: expected .* 656"),
    ({"out": INDEX_KEYS.float(), **SLOTS}, ArgumentTypeError, "^out: expected dtype uint8"),
    ({"out": INDEX_KEYS, **SLOTS}, ArgumentValueError, "^out: expected rows of 16 .*; got 128"),
    ({"out": OUT.clone().requires_grad_(), **SLOTS}, UnsupportedError, "^out: what is written"),
    ({"out": OUT, "slots": SLOTS}, ArgumentTypeError, "slots: expected a torch.Tensor; got dict"),
    ({"out": OUT, "slots": torch.tensor([1])}, ArgumentValueError, "slots: expected shape"),
    ({"out": OUT, "slots": torch.arange(8) + 2}, ArgumentValueError, r"slots in \[0, 8\); got 9"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG, ids=[w[2] for w in WRONG])
def test_wrong_arguments_are_refused_before_anything_is_written(wrong, error, message):
    given = {"kv": X, "gate": X, "ape": None, "ratio": 4, **wrong}
    before = {
        n: x.clone() for n, x in wrong.items() if n in ("state", "out") and type(x) is not list
    }
    with pytest.raises(error, match=message):
        flashdsa.compress_kv(**given)
    assert all(x.is_meta or torch.equal(wrong[name], x) for name, x in before.items())


def test_no_gradient_with_a_state_or_a_cache():
    kv = X.clone().requires_grad_()
    state = {"state": torch.zeros(1, 4, 2, 16), "seen": torch.tensor([0])}
    with pytest.raises(UnsupportedError, match="with state no gradient"):
        flashdsa.compress_kv(kv, X, ratio=4, **state)
    with pytest.raises(UnsupportedError, match="with out no gradient"):
        flashdsa.compress_kv(kv, X, ratio=4, out=OUT, slots=torch.arange(8))


def test_fewer_tokens_than_a_window_have_no_entry_and_gradients_of_zero():
    kv = X[:3].clone().requires_grad_()
    entries = flashdsa.compress_kv(kv, X[:3], ratio=4)
    assert entries.shape == (0, 16)
    entries.sum().backward()
    assert not kv.grad.any()
    with pytest.raises(ArgumentTypeError, match="gate: expected dtype"):
        flashdsa.compress_kv(kv, X[:3].half(), ratio=4)


def test_rotations_outside_the_tables_are_refused():
    with pytest.raises(ArgumentValueError, match=r"positions: expected rows .* \[0, 1\); got 3"):
        flashdsa.rotate_tail(X[:2], torch.tensor([0, 3]), (TABLE, TABLE))


ROTATIONS = [
    (None, "rotation: expected a pair (cos, sin); got NoneType"),
    ((TABLE, None), "rotation[1]: expected a torch.Tensor; got NoneType"),
    ((TABLE.double(), TABLE), "rotation[0]: expected dtype float32; got float64"),
]


@pytest.mark.parametrize(("rotation", "message"), ROTATIONS)
def test_rotations_that_are_no_tables_are_refused(rotation, message):
    with pytest.raises(ArgumentTypeError, match="^" + re.escape(message)):
        flashdsa.rotate_tail(X, torch.arange(8), rotation)


@pytest.mark.parametrize("shape", [(0, 8), (0, 2, 8), (3, 0, 8)])
def test_no_rows_are_rotated(shape):
    x = torch.zeros(shape, requires_grad=True)
    turned = flashdsa.rotate_tail(x, torch.zeros(shape[0]).int(), (X[:, :2], X[:, :2]))
    assert turned.shape == shape
    turned.sum().backward()
    assert x.grad.shape == shape
