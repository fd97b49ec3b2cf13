"""PTX out of fat binaries, and the choice among several."""

import struct
from collections.abc import Sequence

import pytest

from ptxemu.cuda.fatbin import ImageError, arch_of_program, lz4_block, ptx_for

LZ4, ZSTD = 0x2000, 0x8000


def _ptx(target: str) -> bytes:
    return f".version 8.8\n.target {target}\n.address_size 64\n".encode() + b"\0"


def _entry(kind: int, arch: int, payload: bytes, flags: int = 0, unpacked: int = 0) -> bytes:
    stored = payload + bytes(-len(payload) % 8)
    packed = len(payload) if flags & (LZ4 | ZSTD) else 0
    head = struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(stored), packed, 0, 7, 8, arch, 0, 0, flags, 0,
        unpacked,
    )  # fmt: skip
    return head + stored


def _fat(entries: Sequence[bytes]) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@pytest.mark.parametrize(
    ("targets", "arch", "chosen"),
    [
        (["sm_80", "sm_90"], "sm_90a", "sm_90"),
        (["sm_90a", "sm_90"], "sm_90a", "sm_90a"),
        (["sm_90", "sm_90a"], "sm_100a", "sm_90"),
        (["sm_90", "sm_100f", "sm_100"], "sm_100a", "sm_100f"),
        (["sm_75", "sm_120"], "sm_90a", "sm_75"),
    ],
)
def test_the_newest_ptx_that_the_device_runs_is_taken(
    targets: list[str], arch: str, chosen: str
) -> None:
    image = _fat([_entry(2, 90, b"\x7fELF"), *(_entry(1, 90, _ptx(t)) for t in targets)])
    assert f".target {chosen}\n" in ptx_for(image, arch)


def test_an_image_without_ptx_for_the_device_says_what_it_has() -> None:
    image = _fat([_entry(2, 90, b"\x7fELF"), _entry(1, 90, _ptx("sm_90a"))])
    with pytest.raises(ImageError, match=r"no PTX for sm_100a: PTX for sm_90a, machine code for"):
        ptx_for(image, "sm_100a")
    with pytest.raises(ImageError, match=r"-gencode arch=compute_90a,code=compute_90a"):
        ptx_for(b"\x7fELF" + bytes(60), "sm_90a")
    with pytest.raises(ImageError, match="not a whole fat binary"):
        ptx_for(image[:-8], "sm_90a")


def test_text_is_an_image() -> None:
    assert ptx_for(_ptx("sm_90"), "sm_90a").endswith(".address_size 64\n")


# A literal run of 20 (15 + 5) bytes, a match of 4 + 15 + 2 that overlaps itself, two literals.
_BLOCK = bytes([0xFF, 5, *range(20), 2, 0, 2, 0x20]) + b"ab"
_UNPACKED = bytes(range(20)) + bytes([18, 19] * 10 + [18]) + b"ab"


def test_lz4_blocks_with_long_runs_and_overlapping_matches() -> None:
    assert lz4_block(_BLOCK, len(_UNPACKED)) == _UNPACKED
    with pytest.raises(ImageError, match="damaged"):
        lz4_block(bytes([0x1F, 65, 9, 0]), 40)
    with pytest.raises(ImageError, match="damaged"):
        lz4_block(_BLOCK[:-4], len(_UNPACKED))


def test_a_compressed_entry_is_unpacked() -> None:
    text = _ptx("sm_90a")
    packed = bytes([0xF0, len(text) - 15]) + text  # one run of literals
    image = _fat([_entry(1, 90, packed, LZ4, len(text))])
    assert ptx_for(image, "sm_90a").encode() + b"\0" == text


def test_the_device_of_a_program_is_what_it_has_ptx_for(tmp_path) -> None:
    program = tmp_path / "program"
    archs = ("sm_90a", "sm_100a")
    program.write_bytes(b"code" * 5 + _fat([_entry(1, 90, _ptx("sm_90"))]))
    assert arch_of_program(str(program), archs) is None
    with program.open("ab") as file:
        file.write(_fat([_entry(1, 100, _ptx("sm_100a"))]))
    assert arch_of_program(str(program), archs) == "sm_100a"
    assert arch_of_program(str(tmp_path / "none"), archs) is None


def test_relocatable_device_code_is_refused_by_its_name() -> None:
    with pytest.raises(ImageError, match="relocatable device code"):
        ptx_for(_fat([]), "sm_90a")
