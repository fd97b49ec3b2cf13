"""Memory of the device that nobody has written, and that a kernel reads."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from tests.kernel_run import TID, load, source, store

from ptxemu import api
from ptxemu.check import Finding
from ptxemu.cuda.memory import EmulatedMemory
from ptxemu.memory.global_memory import GlobalMemory

PAGE = 4096
READ = TID + load("%r1", "a") + store("b", "%r1")
WRITE = TID + store("a", "%r0") + "bar.sync 0;\n"


@pytest.fixture
def device() -> Iterator[EmulatedMemory]:
    with closing(EmulatedMemory(7)) as memory:
        memory.allocated(memory.base, 4 * PAGE, 0)
        memory.allocated(memory.base + 4 * PAGE, 4 * PAGE, 0)
        yield memory


def findings(device: EmulatedMemory, body: str, *, offset: int = 0) -> list[Finding]:
    """Launch on the two allocations, `a` from an offset on."""
    memory = GlobalMemory()
    device.register_in(memory)
    args = [device.base + offset, device.base + 4 * PAGE]
    module = api.load(source(body, ("a", "b")))
    return module.launch("k", 1, 64, args=args, memory=memory, check=True).findings


@pytest.mark.usefixtures("judged_by")
def test_a_read_of_memory_that_nobody_wrote_is_a_warning(device: EmulatedMemory) -> None:
    (found,) = findings(device, READ)
    assert (found.code, found.level) == ("uninitialised-read", "warning")
    assert "of global memory 0x27" in found.message and "nobody has written" in found.message


@pytest.mark.usefixtures("judged_by")
def test_what_the_host_an_earlier_kernel_or_the_kernel_itself_wrote_is_there(
    device: EmulatedMemory,
) -> None:
    device.view(device.base, 256)[:] = 1
    assert findings(device, READ) == []
    assert findings(device, WRITE + READ, offset=PAGE) == []
    assert findings(device, READ, offset=PAGE) == []
    assert [f.code for f in findings(device, READ, offset=2 * PAGE)] == ["uninitialised-read"]


def test_other_kinds_of_memory_begin_as_zeros(device: EmulatedMemory) -> None:
    for kind in (1, 2):
        device.allocated(device.base, 4 * PAGE, kind)
        assert findings(device, READ) == []


def test_blank_is_what_lies_on_untouched_pages(device: EmulatedMemory) -> None:
    device.view(device.base + PAGE + 100, 4)[:] = 1
    memory = GlobalMemory()
    device.register_in(memory)
    first = [(a - device.base, b - device.base) for a, b in memory.blank]
    assert first == [(0, PAGE), (2 * PAGE, 4 * PAGE), (4 * PAGE, 8 * PAGE)]


def test_arrays_of_the_caller_are_written() -> None:
    a, b = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    module = api.load(source(READ, ("a", "b")))
    assert module.launch("k", 1, 64, args=[a, b], check=True).findings == []
