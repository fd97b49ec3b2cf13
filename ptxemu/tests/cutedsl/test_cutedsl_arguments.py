"""The memory that a call's arguments make addressable, words of parameters, linked objects."""

import ctypes
import dataclasses
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest

from ptxemu.cutedsl import arguments, gpu_blocks
from ptxemu.cutedsl.arguments import ArgumentRegion, address_words, collect, merged
from ptxemu.cutedsl.host_function import LinkedObject, LinkError, undefined_symbols
from ptxemu.errors import ExecutionError
from ptxemu.patching import Patches
from ptxemu.syntax.parser import parse_module

# The memory that a call's arguments make addressable.


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    inner: Any


def address(array):
    return int(array.ctypes.data)


def memory_of(found, *, words=(), allow=None, notes=None):
    """Memory of a launch whose kernel reads each of the words, a parameter each."""
    numbers = range(len(words))
    parameters = ", ".join(f".param .u64 p{i}" for i in numbers)
    loads = "".join(f"ld.param.u64 %rd0, [p{i}];" for i in numbers)
    kernel = parse_module(
        ".version 9.0\n.target sm_90a\n.address_size 64\n"
        f".visible .entry k({parameters}) {{ .reg .b64 %rd<1>; {loads} ret; }}"
    ).functions["k"]
    values = [int(word).to_bytes(8, "little") for word in words]
    note = (notes if notes is not None else []).append
    return found.memory(kernel, values, note, allow_unregistered=allow)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"k": x}, Box])
def test_arrays_are_found_wherever_they_are(wrap):
    array = np.zeros(4, np.float32)
    memory = memory_of(collect([("x", wrap(array))]))
    assert len(memory.span(address(array), 16)) == 16
    with pytest.raises(ExecutionError, match="behind the end of x"):
        memory.span(address(array) + 16, 1)


def test_fields_name_the_memory():
    array = np.zeros(4, np.float32)
    found = collect([("p", Pair(None, array))])
    assert [region.name for region in found.regions] == ["p.right"]


def test_a_view_stands_for_its_whole_array():
    array = np.zeros((4, 4), np.float32)
    memory = memory_of(collect([("x", array[1:3, ::2])]))
    assert len(memory.span(address(array), 64)) == 64


def test_overlapping_regions_are_joined_and_others_are_not():
    regions = [
        ArgumentRegion(0, 10, "a", None),
        ArgumentRegion(20, 30, "c", None),
        ArgumentRegion(5, 15, "b", None),
    ]
    joined = [(r.start, r.end, r.name) for r in merged(regions)]
    assert joined == [(0, 15, "a, b"), (20, 30, "c")]


def test_writes_reach_the_array():
    array = np.zeros(4, np.uint8)
    memory_of(collect([("x", array)])).span(address(array), 4)[:] = 7
    assert array.tolist() == [7] * 4


def test_a_stray_address_is_an_error_unless_the_caller_passed_bare_pointers():
    array, stray = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
    notes: list[str] = []
    strict = memory_of(collect([("x", array)]), words=[address(stray)], notes=notes)
    with pytest.raises(ExecutionError):
        strict.span(address(stray), 4)
    assert notes == []
    pointer = ctypes.c_void_p(address(stray))
    loose = memory_of(collect([("x", array), ("y", pointer)]), words=[address(stray)], notes=notes)
    assert len(loose.span(address(stray), 4)) == 4
    assert len(notes) == 1


def test_bare_pointers_can_be_forbidden():
    stray = np.zeros(4, np.uint8)
    found = collect([("y", address(stray))])
    memory = memory_of(found, words=[address(stray)], allow=False)
    with pytest.raises(ExecutionError):
        memory.span(address(stray), 4)


def test_numbers_that_only_look_like_addresses_change_nothing(monkeypatch):
    """Nor are they looked up among the live tensors, which takes as long as a small launch."""
    monkeypatch.setattr(arguments, "_live_tensors", lambda: pytest.fail("looked up"))
    array = np.zeros(4, np.uint8)
    table = np.array([(1 << 32) | 7])
    found = collect([("x", array), ("n", 5), ("table", table)])
    assert not memory_of(found, words=[(64 << 32) | 128]).allow_unregistered


def test_pointer_tables_reach_live_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    hidden = torch.arange(4, dtype=torch.float32)
    table = torch.tensor([hidden.data_ptr()], dtype=torch.int64)
    memory = memory_of(collect([("table", table)]))
    assert memory.span(hidden.data_ptr(), 16).view(np.float32).tolist() == [0, 1, 2, 3]


def test_what_a_bare_pointer_leads_to_is_searched_for_live_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    hidden, other = torch.arange(4, dtype=torch.float32), torch.zeros(4)
    inner = torch.tensor([0, hidden.data_ptr() + 4], dtype=torch.int64)
    workspace = torch.zeros(128, dtype=torch.uint8)
    workspace[8:16] = torch.tensor([inner.data_ptr()]).view(torch.uint8)
    pointer = ctypes.c_void_p(workspace.data_ptr())
    memory = memory_of(collect([("workspace", pointer)]), words=[workspace.data_ptr()])
    assert memory.span(hidden.data_ptr(), 16).view(np.float32).tolist() == [0, 1, 2, 3]
    with pytest.raises(ExecutionError):
        memory.span(other.data_ptr(), 16)


def test_memory_of_a_tensor_that_was_just_freed_is_used_with_a_note():
    """As under torch's CUDA allocator, which unmaps nothing: benchmarks of grouped GEMMs do it."""
    block = np.zeros(64, np.uint8)
    where, notes = address(block), []
    gpu_blocks.add(block)
    del block
    memory = memory_of(collect([("table", np.array([where + 8]))]), notes=notes)
    assert len(memory.span(where, 64)) == 64
    assert len(notes) == 1 and "was freed" in notes[0]


def test_freed_memory_is_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(gpu_blocks, "KEPT_BYTES", 100)
    blocks = [np.zeros(60, np.uint8) for _ in range(2)]
    for block in blocks:
        gpu_blocks.add(block)
    assert gpu_blocks.kept_at(address(blocks[0])) is None
    assert gpu_blocks.kept_at(address(blocks[1]) + 59) is blocks[1]


# Words of a launch's parameters that may be addresses: those that the kernel reads whole.

FIRST, SECOND, THIRD = 0x7F79_0000_0010, 0x7F79_0000_0020, 0x7F79_0000_0030
VIEW = struct.pack("<QQQ", FIRST, SECOND, THIRD)


def words_of(body: str, value: bytes = VIEW, align: int = 8) -> list[int]:
    """The words of a kernel's one parameter."""
    text = (
        ".version 9.0\n.target sm_90a\n.address_size 64\n"
        f".visible .entry k(.param .align {align} .b8 p[{len(value)}])\n"
        f"{{ .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .b128 %rq<2>; {body} ret; }}"
    )
    return list(address_words(parse_module(text).functions["k"], [value]))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", []),
        ("ld.param.b64 %rd0, [p];", [FIRST]),
        ("ld.param.u64 %rd0, [p+16];", [THIRD]),
        ("ld.param.v2.b64 {%rd0, %rd1}, [p];", [FIRST, SECOND]),
        ("ld.param.b128 %rq0, [p];", [FIRST, SECOND]),
        ("ld.param.b32 %r0, [p]; ld.param.v2.b32 {%r1, %r2}, [p+8];", []),
        ("ld.param.b64 %rd0, [p]; ld.param.b64 %rd1, [p];", [FIRST]),
        ("mov.b64 %rd0, p;", [FIRST, SECOND, THIRD]),
        ("ld.param.b64 %rd0, [p]; mov.b64 %rd0, p;", [FIRST, SECOND, THIRD]),
    ],
)
def test_words_that_are_read_whole(body: str, expected: list[int]) -> None:
    """Padding holds what the host's stack had there, and sizes lie two in a word."""
    assert words_of(body) == expected


def test_words_that_no_process_has_as_addresses() -> None:
    value = struct.pack("<QQQ", 5, 1 << 63, FIRST)
    assert words_of("mov.b64 %rd0, p;", value) == [FIRST]


def test_a_tensor_map_begins_with_its_address() -> None:
    value = struct.pack("<16Q", *range(FIRST, FIRST + 16))
    assert words_of("mov.b64 %rd0, p;", value, align=64) == [FIRST]


# Objects are linked against given functions; what is missing is named.

CODE = """
declare i32 @supplied(i32)
define i32 @entry(i32 %x) {
  %y = call i32 @supplied(i32 %x)
  %z = add i32 %y, 1
  ret i32 %z
}
"""


@pytest.fixture(scope="module")
def elf():
    llvm = pytest.importorskip("llvmlite.binding", reason="llvmlite is not installed")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic")
    return machine.emit_object(llvm.parse_assembly(CODE))


def test_undefined_symbols_are_those_of_the_object(elf):
    assert [name for name in undefined_symbols(elf) if not name.startswith("_")] == ["supplied"]


def test_a_file_that_is_no_object_is_refused():
    with pytest.raises(ValueError, match="ELF"):
        undefined_symbols(b"not an object")


def test_linked_code_calls_what_it_was_given(elf):
    callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(lambda x: 10 * x)
    linked = LinkedObject(elf, lambda _: ctypes.cast(callback, ctypes.c_void_p).value)
    entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(linked.address("entry"))
    assert entry(4) == 41
    with pytest.raises(LinkError, match="no function other"):
        linked.address("other")


def test_a_missing_function_is_named_instead_of_ending_the_process(elf):
    with pytest.raises(LinkError, match="supplied"):
        LinkedObject(elf, lambda _: None)


def test_patches_are_undone_in_reverse_and_inherited_attributes_stay_inherited():
    class Base:
        value = 1

    class Derived(Base):
        pass

    patches = Patches()
    assert patches.replace(Derived, "value", 2) == 1
    patches.replace(Derived, "value", 3)
    assert Derived.value == 3
    patches.undo()
    assert Derived.value == 1 and "value" not in vars(Derived)
