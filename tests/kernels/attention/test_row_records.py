"""Any record of packed rows is served right, or refused by the field that a backend cannot read.

`tests/support/packed_records.py` draws the records and says in float64 what their bytes are.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.emulated.devices import H200, SMALL
from flashdsa.backends.emulated.runner import emulation, running_on
from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.row_formats import ROW_FORMATS, SHIPPED, RowFormat
from flashdsa.verify.launch_list import Recorder
from tests.support import packed_records as model

PAGES, PAGE_ROWS = 2, 3
EMULATED = ("emulate-sm90", "emulate-triton")
HEADS = 20
"""More than the kernel of few heads takes."""


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a record into the table until the test ends."""

    def put(form: RowFormat) -> RowFormat:
        monkeypatch.setitem(ROW_FORMATS, form.name, form)
        return form

    return put


def pages_of(form: RowFormat, kv: Tensor, page_rows: int, gap: int = 16) -> Tensor:
    """kv in pages that begin at multiples of 16 bytes; what is between them, and what a row has
    without use, is NaN as e4m3, e8m0 and fp32."""
    num_pages, used = len(kv) // page_rows, page_rows * form.row_bytes
    memory = torch.full((num_pages, -(-used // 16) * 16 + gap), 0xFF, dtype=torch.uint8)
    pages = memory[:, :used].unflatten(1, (page_rows, 1, form.row_bytes))
    flashdsa.write_kv_cache(kv, torch.arange(len(kv)), pages, kv_format=form.name)
    assert (memory[:, used:] == 0xFF).all()
    return pages


ODD = (
    model.named(30, 3, "e4m3", rope=5, fp4=1, unused=1),
    model.named(7, 7, "fp32", rope=1, split=1),
    model.named(1, 1, "e8m0"),
    model.named(600, 300, "fp32", rope=3, fp4=1, unused=3),
)
"""Records that no kernel reads."""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_cpu_and_torch_write_and_read_any_record(seed: int, register: Any) -> None:
    g = torch.Generator().manual_seed(seed)
    for form in (*ODD, *islice(model.drawn(seed), 56 * (1 + 9 * seed))):
        register(form)
        rows = PAGES * PAGE_ROWS
        kv = torch.randn(rows, form.d_qk, generator=g) * torch.logspace(-5, 3, rows)[:, None]
        pages = pages_of(form, kv, PAGE_ROWS)
        _, stored, _ = model.fields_of(pages[:, :, 0], form)
        scales, values = model.scales_of(stored, form), model.values_of(pages[:, :, 0], form)
        assert torch.equal(scales, model.expected_scales(kv, form)), form
        check_codes(kv.double(), values, scales, form)
        packed = flashdsa.quantize_kv(kv, kv_format=form.name)
        assert torch.equal(model.values_of(packed[:, None], form), values), form
        for slots in (torch.arange(rows), torch.tensor([rows - 2])):
            read = flashdsa.read_kv_cache(pages, slots, kv_format=form.name)
            assert torch.equal(read, values[slots].bfloat16()), form
        q = torch.randn(2, 3, form.d_qk, generator=g, dtype=torch.float64)
        indices = torch.tensor([[5, 0, 3], [4, -1, 6]], dtype=torch.int32)
        d_v = min(form.d_qk, 512)
        expected = model.attention(q, values, indices, d_v)
        for backend, source in (("cpu", pages), ("torch", pages), ("cpu", packed)):
            out, _ = flashdsa.sparse_mla_fwd(
                q, source, indices, d_v=d_v, kv_format=form.name, backend=backend
            )
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10, msg=str(form))


def check_codes(kv: Tensor, values: Tensor, scales: Tensor, form: RowFormat) -> None:
    """Each value is within half a step of what was written, or the largest code is nearest."""
    x, found = kv[:, : form.columns], values[:, : form.columns]
    scale = scales.repeat_interleave(form.group, dim=1)
    if form.fp4:
        half = torch.where(x.abs() > 4 * scale, 1.0, torch.where(x.abs() > 2 * scale, 0.5, 0.25))
    else:
        exponent = (x / scale).abs().clamp_min(2.0**-6).log2().floor()
        half = 2.0 ** (exponent - 4)
    largest = (found.abs() == model.MOST[form.fp4] * scale) & (x.abs() >= found.abs())
    assert (((x - found).abs() <= half * scale * (1 + 1e-6)) | largest).all(), form
    assert torch.equal(values[:, form.columns :], kv[:, form.columns :].bfloat16().double()), form


def operands_of(
    form: RowFormat, keys: int, page_rows: int, queries: int = 2, slots: int = 40
) -> dict[str, Any]:
    """A decode over pages: the last row is named; the first and others, NaN, are not."""
    g = torch.Generator().manual_seed(keys)
    kv = torch.randn(keys, form.d_qk, generator=g)
    kv[:-1:7] = torch.nan
    indices = torch.randint(-1, keys, (queries, slots), generator=g, dtype=torch.int32)
    indices[(indices % 7 == 0) & (indices < keys - 1)] = -1
    indices[:, -1] = keys - 1
    return {
        "q": (torch.randn(queries, HEADS, form.d_qk, generator=g) * 0.3).bfloat16(),
        "kv": pages_of(form, kv, page_rows),
        "indices": indices,
        "kv_format": form.name,
        "d_v": min(512, form.d_qk),
    }


def twice(given: dict[str, Any]) -> dict[str, Any]:
    """The same rows as a second source, whose list is that of the query before."""
    extra = {"extra_kv": given["kv"], "extra_indices": given["indices"].roll(1, 0)}
    return given | extra


def check_kernels(form: RowFormat, backend: str, page_rows: int, **more: Any) -> list[str]:
    """O is that of the model within the roundings of packed rows, and the emulator finds nothing.
    Returns the kernels' names, of an emulated backend.

    Args:
        more: queries and slots; `two`: whether there is a second source.
    """
    two = more.pop("two", False)
    given = operands_of(form, 16 * page_rows, page_rows, **more)
    given = twice(given) if two else given
    values = model.values_of(given["kv"][:, :, 0], form).nan_to_num()
    indices = torch.cat([given["indices"], given.get("extra_indices", given["indices"][:, :0])], 1)
    expected = model.attention(given["q"], values, indices, 512)
    if not backend.startswith("emulate-"):
        given = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}
    recorder = Recorder(SMALL)
    with running_on(recorder):
        flashdsa.sparse_mla_fwd(**given, backend=backend)
    with emulation(SMALL):
        out, _ = flashdsa.sparse_mla_fwd(**given, backend=backend)
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert error < 3.5e-3, (float(error), form)
    return [*recorder.launched, *recorder.of_triton]


LAUNCHED = [
    ("emulate-sm90", model.named(448, 16, "e4m3", rope=64, fp4=1, unused=4), 5),  # 384 bytes
    ("emulate-triton", model.named(448, 16, "e4m3", rope=64, fp4=1, unused=4), 5),
    ("emulate-triton", model.named(512, 64, "e4m3", rope=64, unused=2, split=1), 5),
    *(
        pytest.param("emulate-sm90", form, 8, marks=pytest.mark.slow)
        for form in (
            model.named(512, 16, "e4m3", rope=64, fp4=1),  # 416
            model.named(512, 16, "e4m3", rope=64, fp4=1, unused=16),  # 432
            model.named(448, 32, "e8m0", rope=64, unused=2),  # 592
        )
    ),
]


@pytest.mark.parametrize(("backend", "form", "page_rows"), LAUNCHED, ids=str)
def test_kernels_read_records_that_they_were_not_written_for(
    backend: str, form: RowFormat, page_rows: int, register: Any
) -> None:
    pytest.importorskip("cutlass" if backend == "emulate-sm90" else "triton")
    assert check_kernels(register(form), backend, page_rows)


@pytest.mark.parametrize(
    "backend",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in EMULATED),
        *(pytest.param(name, marks=pytest.mark.gpu) for name in ("sm90", "triton")),
    ],
)
def test_kernels_read_every_drawn_record_that_they_take(backend: str, register: Any) -> None:
    pytest.importorskip("cutlass" if backend.endswith("sm90") else "triton")
    emulated = f"emulate-{backend.removeprefix('emulate-')}"
    taken = (form for form in model.drawn(2) if not refused(register(form), emulated))
    launched: list[str] = []
    for number, form in enumerate(islice(taken, 9)):
        two = number % 2 == 1 and (form.d_qk == 512 or emulated != "emulate-sm90")
        size = {"queries": (1, 2, 7)[number % 3], "slots": (40, 150)[number // 3 % 2]}
        launched += check_kernels(form, backend, 2 + number % 7, two=two, **size)
    for kind in ("joined", "stream_k") if backend == "emulate-sm90" else ():
        assert any(kind in name for name in launched), launched


def refused(form: RowFormat, backend: str) -> str:
    """What a backend says against a record; "" if it would launch."""
    recorder = Recorder(H200)
    with running_on(recorder):
        try:
            flashdsa.sparse_mla_fwd(**operands_of(form, 8, 2), backend=backend)
        except UnsupportedError as error:
            assert not recorder.launched and not recorder.of_triton
            return str(error)
    assert recorder.launched or recorder.of_triton
    return ""


FIELDS = ("columns + rope: takes", "scale of ", "group of ", "d_qk: takes")
PLACES = ("row_bytes", "data_bytes", "rope_at", "scales_at", "scale_bytes")


def test_records_that_kernels_do_not_read_are_refused_by_field(register: Any) -> None:
    """Many records of each kind; a launch is only written down."""
    said = {backend: [refused(register(form), backend) for form in islice(model.drawn(3), 84)]
            for backend in EMULATED}  # fmt: skip
    for backend, messages in said.items():
        places = [f"{place}: takes multiples of" for place in PLACES]
        assert all(any(field in one for field in (*FIELDS, *places)) for one in messages if one)
        assert "" in messages, backend
        for field in (*FIELDS, *places[:3:2]):
            if (backend, field) != ("emulate-triton", "scale of "):
                assert any(field in one for one in messages), (backend, field)


REFUSED = [
    ("emulate-sm90", {"fp4": 1, "scale": "e8m0", "group": 32, "unused": 2},
     "scale of e2m1: takes e4m3; got e8m0"),  # 368 bytes
    ("emulate-sm90", {"group": 64, "unused": 1}, "row_bytes: takes multiples of 16; got 584"),
    ("emulate-sm90", {"scale": "fp32", "group": 64}, "group of fp32 scales: takes 128; got 64"),
    ("emulate-triton", {"scale": "fp32", "group": 64}, "group of fp32 scales: takes 128; got 64"),
    ("emulate-sm90", {"group": 16, "unused": 4}, "group of e8m0 scales: takes 32, 64; got 16"),
    ("emulate-sm90", {"scale": "e4m3", "group": 32}, "scale of e4m3: takes fp32, e8m0; got e4m3"),
    ("emulate-sm90", {"group": 32, "split": 1}, "scale_bytes: takes multiples of 8; got 14"),
    ("emulate-triton", {"group": 32, "unused": 1}, "rope_at: takes multiples of 2; got 463"),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "fields", "message"), REFUSED)
def test_a_refusal_names_the_field(
    backend: str, fields: dict[str, Any], message: str, register: Any
) -> None:
    form = register(model.named(**{"columns": 448, "scale": "e8m0", "rope": 64, **fields}))
    assert f"kv_format {form.name}: " in (found := refused(form, backend)) and message in found


def test_two_sources_of_576_columns_are_refused(register: Any) -> None:
    form = register(model.named(512, 32, "e8m0", rope=64))
    given = twice(operands_of(form, 8, 2))
    with pytest.raises(UnsupportedError, match=f"extra_kv and kv_format {form.name}: not together"):
        flashdsa.sparse_mla_fwd(**given, backend="emulate-sm90")


IMPOSSIBLE = [
    ({"name": "a b"}, "name: expected letters, digits and underscores; got 'a b'"),
    ({"columns": 0}, "columns: expected a multiple of 1 from 1 on; got 0"),
    ({"columns": 15, "group": 5, "fp4": True}, "columns: expected a multiple of 2 .* got 15"),
    ({"group": 128}, "group: expected a divisor of columns, 448; got 128"),
    ({"scale": "bf16"}, "scale: expected one of fp32, e8m0, e4m3; got 'bf16'"),
    ({"rope": -64}, "rope: expected 0 or more; got -64"),
    ({"unused": -1}, "unused: expected 0 or more; got -1"),
]


@pytest.mark.parametrize(("fields", "message"), IMPOSSIBLE)
def test_rows_that_cannot_be_are_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentValueError, match=message):
        RowFormat(**{"name": "a", "columns": 448, "group": 64, "scale": "e8m0", **fields})


def test_pages_of_656_bytes_stay_pages_if_a_format_of_them_is_split(register: Any) -> None:
    """As rows they would be read with the scales of others: `v32` has so many bytes, too."""
    split = register(model.named(512, 32, "e8m0", rope=64, split=1))
    assert split.row_bytes == ROW_FORMATS["v32"].row_bytes
    for form in (split, ROW_FORMATS["v32"]):
        given = operands_of(form, 128, 64)
        values = model.values_of(given["kv"][:, :, 0], form).nan_to_num()
        expected = model.attention(given["q"], values, given["indices"], 512)
        out, _ = flashdsa.sparse_mla_fwd(**given)
        assert (out.double() - expected).norm() < 3e-3 * expected.norm()


def test_a_name_is_given_once(register: Any) -> None:
    """What was chosen or compiled for the first format would serve the second."""
    for name, own in (("v4", "v4"), ("first", "second")):
        with pytest.raises(
            ArgumentValueError, match=rf"ROW_FORMATS\['{name}'\]: expected a format"
        ):
            ROW_FORMATS[name] = RowFormat(own, 448, 32, "e8m0", rope=64, unused=2)
    before = dict(ROW_FORMATS)
    register(ROW_FORMATS["v4"])
    assert before == ROW_FORMATS and set(SHIPPED) <= set(ROW_FORMATS.values())


def test_functions_are_not_found_by_another_plan_s_name(register: Any) -> None:
    """`mla_decode_v4_joined` is the shipped kernel of two sources of `v4`."""
    form = register(RowFormat("v4_joined", 448, 32, "e8m0", rope=64, unused=2))
    with running_on(Recorder(H200)), pytest.raises(ValueError, match="its catalog's plans only"):
        flashdsa.sparse_mla_fwd(**operands_of(form, 8, 2), backend="emulate-sm90")
