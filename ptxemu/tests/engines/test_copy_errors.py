"""Copies that hardware traps on or that nobody defines: each is an error that names the cause."""

import numpy as np
import pytest
from tests.engines.copy_runner import address, run
from tests.kernel_run import Recorder

from ptxemu.descriptors.tensor_map import encode_tiled
from ptxemu.errors import ExecutionError, UnsupportedInstructionError

ARRAY = np.zeros((32, 64), np.uint16)
INIT = "@%p0 mbarrier.init.shared::cta.b64 [%bar], 1; fence.proxy.async; bar.sync 0;"
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
OUT = "cp.async.bulk.global.shared::cta.bulk_group"


def matrix(**changes: object) -> bytes:
    given: dict[str, object] = {
        "data_type": 1,
        "address": address(ARRAY),
        "dims": (64, 32),
        "strides": (128,),
        "box": (16, 4),
    }
    return encode_tiled(**{**given, **changes})  # type: ignore[arg-type]


FLAT = matrix(dims=(64,), strides=(), box=(16,))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{LOAD} [%smem], [%map, {{1, 0}}], [%bar];", "coordinate 1 of u16 is no multiple of 16"),
        (f"{LOAD} [%smem+64], [%map, {{0, 0}}], [%bar];", "not aligned to 128 bytes"),
        (f"{LOAD} [%smem+1024], [%map, {{0, 0}}], [%bar];", "ILLEGAL_ADDRESS"),
        (f"{STORE} [%map, {{-16, 0}}], [%smem];", r"negative coordinates \(-16, 0\)"),
        (f"{STORE} [%map, {{0, 0}}], [%smem+16];", "not aligned to 128 bytes"),
        (f"{LOAD} [%smem], [%flat, {{0, 0}}], [%bar];", "2 coordinates; .* rank is 1"),
        (f"{LOAD} [%smem], [%map+32, {{0, 0}}], [%bar];", "not aligned to 64 bytes"),
        (f"{COPY} [%smem], [%in], 24, [%bar];", "size 24 is not a multiple of 16"),
        (f"{COPY} [%smem], [%in+8], 32, [%bar];", "global address 0x.*8 is not aligned to 16"),
        (f"{COPY} [%smem+8], [%in], 32, [%bar];", "shared address 0x.*8 is not aligned to 16"),
        ("cp.async.ca.shared.global [%smem], [%in+2], 4;", "not aligned to 4"),
        ("cp.async.cg.shared.global [%smem], [%in+8], 16;", "not aligned to 16"),
        (f"{OUT} [%in], [%smem], 8;", "size 8 is not a multiple of 16"),
        (f"{COPY} [%smem], [%in], 1040, [%bar];", "beyond the CTA's"),
        (
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
            "[%map, {0, 0}], [%smem];",
            "no .add of the tensor map's u16",
        ),
        ("mov.b16 %h0, 2;" + COPY + ".multicast::cluster [%smem], [%in], 16, [%bar], %h0;", "mask"),
    ],
)
def test_illegal_copy_is_an_error(body: str, message: str) -> None:
    with pytest.raises(ExecutionError, match=rf"PTX line \d+.*{message}"):
        run(
            INIT + "@!%p0 bra END;" + body + "END:",
            {"map": matrix(), "flat": FLAT, "in": np.zeros((1024,), np.uint8)},
            smem=1024,
        )


@pytest.mark.parametrize(
    "body", [f"{COPY} [%smem], [%in+1024], 16, [%bar];", f"{OUT} [%in+1024], [%smem], 16;"]
)
def test_copy_beyond_an_allocation_is_an_error_of_the_operation(body: str) -> None:
    with pytest.raises(ExecutionError, match=r"cp.async.bulk #\d+ issued by .*illegal global"):
        run(INIT + "@%p0 " + body, {"in": np.zeros(1024, np.uint8)}, smem=1024)


def test_tile_beyond_an_allocation_is_an_error() -> None:
    body = f"{INIT} @%p0 {LOAD} [%smem], [%map, {{0, 32}}], [%bar];"
    with pytest.raises(ExecutionError, match="illegal global address"):
        run(body, {"map": matrix(dims=(64, 64)), "in": ARRAY})


def test_signal_without_an_mbarrier_is_an_error() -> None:
    with pytest.raises(ExecutionError, match="no mbarrier was initialised"):
        run(f"@%p0 {COPY} [%smem], [%in], 16, [%bar];", {"in": ARRAY})


def test_mbarrier_of_another_cta_is_an_error() -> None:
    body = f"{INIT} mapa.shared::cluster.u32 %r0, %bar, 1; @%p0 {COPY} [%smem], [%in], 16, [%r0];"
    with pytest.raises(ExecutionError, match="the mbarrier is in cta"):
        run(body, {"in": ARRAY}, cluster=2)


def test_shared_cta_address_of_another_cta_is_an_error() -> None:
    body = f"{INIT} mapa.shared::cluster.u32 %r0, %smem, 1; @%p0 {OUT} [%in], [%r0], 16;"
    with pytest.raises(ExecutionError, match="shared::cta address"):
        run(body, {"in": ARRAY}, cluster=2)


def test_maps_of_blackwell_are_refused_on_hopper() -> None:
    body = f"{INIT} @%p0 {LOAD} [%smem], [%map, {{0, 0}}], [%bar];"
    with pytest.raises(ExecutionError, match="sm_90a has no tensor map"):
        run(body, {"map": matrix(swizzle=4), "in": ARRAY})


def test_interleaved_map_is_refused() -> None:
    body = f"{INIT} @%p0 {LOAD} [%smem], [%map, {{0, 0, 0}}], [%bar];".replace("2d", "3d")
    made = matrix(interleave=1, dims=(64, 32, 1), strides=(128, 4096), box=(8, 4, 1))
    with pytest.raises(UnsupportedInstructionError, match="interleaved"):
        run(body, {"map": made, "in": ARRAY})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LOAD.replace("tile", "im2col") + " [%smem], [%map, {0, 0}], [%bar];", "im2col"),
        (LOAD.replace("2d", "3d") + " [%smem], [%map, {0, 0}], [%bar];", "expected 3 coord"),
        (f"{LOAD}.multicast::cluster [%smem], [%map, {{0, 0}}], [%bar];", "expected 4 operands"),
        (f"{LOAD}.funny [%smem], [%map, {{0, 0}}], [%bar];", "modifier .funny"),
        ("cp.async.cg.shared.global [%smem], [%map], 8;", "cp-size 8 with .cg"),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%map], [%smem], 16;",
            "noftz",
        ),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.s32 [%map], [%smem], 16;", "inc"),
        ("tensormap.replace.tile.box_dim.global.b1024.b32 [%map], 5, 1;", "ord"),
    ],
)
def test_unknown_form_is_refused_at_load(text: str, message: str) -> None:
    with pytest.raises(UnsupportedInstructionError, match=message):
        run(text, {"map": matrix()})


def test_copy_into_an_mbarrier_is_a_complaint() -> None:
    body = f"""{INIT} @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
      @%p0 {COPY} [%r1], [%in], 16, [%bar];
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%bar], 0;
      @!%p2 bra WAIT;"""
    observer = Recorder()
    run(body, {"in": ARRAY}, registers="and.b32 %r1, %bar, -16;", observer=observer)
    assert [entry[:2] for entry in observer.complaints] == [("error", "mbarrier-overwritten")]
