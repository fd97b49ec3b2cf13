"""The memory map: who wrote which bytes, when they were read, when they are free."""

from xml.etree import ElementTree

import numpy as np
import pytest
from tests.kernel_run import source

from ptxemu import api
from ptxemu.events import Space
from ptxemu.sched.policy import Policy
from ptxemu.trace import MemoryMap
from ptxemu.trace.memory_picture import draw
from tests import producer_consumer

SMEM = (Space.SHARED, 0)


@pytest.fixture(scope="module")
def mapped():
    memory_map = MemoryMap()
    producer_consumer.launch(
        observer=memory_map, policy=Policy(asynchronous="late", warps="round_robin")
    )
    return memory_map


def test_pieces_that_touch_are_one_range(mapped):
    touches = [t for t in mapped.touches[SMEM] if t.who == "bulk load"]
    (load,) = touches
    buffer = producer_consumer.BUFFER
    assert load.is_write
    assert load.ranges == ((buffer, buffer + producer_consumer.BYTES),)


def test_each_warp_reads_its_part(mapped):
    buffer = producer_consumer.BUFFER
    reads = {t.who: t.ranges for t in mapped.touches[SMEM] if not t.is_write}
    for warp in range(4):
        assert reads[warp] == ((buffer + 128 * warp, buffer + 128 * warp + 128),)


def test_the_picture_goes_from_unwritten_over_the_copy_to_the_warps(mapped):
    raster = mapped.raster(SMEM, columns=2000)
    row = (producer_consumer.BUFFER - raster.first) // raster.per_row
    numbers = raster.writers[row]
    seen = [0, *(int(n) for n, before in zip(numbers[1:], numbers, strict=False) if n != before)]
    names = ["nobody", *raster.names]
    assert [names[n] for n in seen] == ["nobody", "bulk load", 3]  # the copy is reversed


def test_bytes_are_live_from_the_write_to_the_last_read(mapped):
    raster = mapped.raster(SMEM, columns=2000)
    row = (producer_consumer.BUFFER - raster.first) // raster.per_row
    reads = np.flatnonzero(raster.is_read[row])
    writes = np.flatnonzero(np.diff(raster.writers[row])) + 1
    live = raster.is_live[row]
    assert live[writes[0] : reads[0] + 1].all()
    assert not live[reads[0] + 1 : writes[1]].any()
    assert live[writes[1] : reads[-1] + 1].all()
    assert not live[: writes[0]].any()


def test_the_picture_is_well_formed_with_axes_and_legend(mapped):
    root = ElementTree.fromstring(draw(mapped, roles={0: "copy"}, title="<k>"))
    words = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"<k>", "logical time (ticks)", "CTA-relative shared address"} <= words
    assert {"bulk load", "copy", "warp 1", "not written yet"} <= words
    assert "Shared memory of cta (0,0,0)" in words


def test_columns_of_tmem_are_rows_of_their_own():
    memory_map = MemoryMap()
    body = """
        mov.u32 %r1, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
        ld.shared.u32 %r2, [%r1]; add.u32 %r2, %r2, 8;
        tcgen05.st.sync.aligned.32x32b.x2.b32 [%r2], {%r1, %r1}; tcgen05.wait::st.sync.aligned;
        sub.u32 %r2, %r2, 8; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
        tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    """
    text = source(body, {}, arch="sm_100a", shared=64)
    api.load(text).launch("k", 1, 32, observer=memory_map)
    (store,) = memory_map.touches[Space.TMEM, 0]
    assert store.who == "TMEM store"
    assert store.ranges == ((8, 10),)
    raster = memory_map.raster((Space.TMEM, 0))
    assert (raster.first, raster.per_row, len(raster.writers)) == (8, 1, 2)
