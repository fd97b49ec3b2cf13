"""Kinds of files that ptxemu's commands read, for `tests.mutated_files`."""

import io
import random
import struct
import tempfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
from tests.cli.test_ptxemu_cli import AXPY, RACE
from tests.mutated_files import Kind, mutated_bytes, mutated_text

import ptxemu
from ptxemu.cli.main import main
from ptxemu.cuda.fatbin import ImageError, ptx_for
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.global_memory import GlobalMemory
from tests import producer_consumer

ERROR = "ptxemu: error: "
RECORDINGS = Path(__file__).parents[1] / "compilers" / "recordings"
NESTED = """.version 8.6
.target sm_90a
.address_size 64
.const .align 4 .b8 table[64] = {1, 2, 3, 4};
.func (.param .b32 out) leaf(.param .b32 in)
{ .reg .b32 %r<4>; ld.param.b32 %r1, [in]; add.s32 %r2, %r1, 7; st.param.b32 [out], %r2; ret; }
.func (.param .b32 out) twice(.param .b32 in)
{ .reg .b32 %r<4>; .param .b32 p; .param .b32 q; ld.param.b32 %r1, [in];
st.param.b32 [p], %r1; call.uni (q), leaf, (p); ld.param.b32 %r2, [q];
st.param.b32 [p], %r2; call.uni (q), leaf, (p); ld.param.b32 %r2, [q];
st.param.b32 [out], %r2; ret; }
.visible .entry k(.param .u64 x, .param .u64 y)
{ .reg .b32 %r<4>; .reg .b64 %rd<4>; .local .align 4 .b8 own[64]; .param .b32 p; .param .b32 q;
ld.param.u64 %rd1, [x]; ld.const.b32 %r1, [table]; st.param.b32 [p], %r1;
call.uni (q), twice, (p); ld.param.b32 %r2, [q]; st.global.b32 [%rd1], %r2; ret; }
"""


def _carry_out(*words: str) -> partial[int]:
    return partial(_run, words)


def _run(words: tuple[str, ...], path: Path) -> int:
    return main([words[0], str(path), *words[1:]])


LAUNCH = ("--quiet", "--time-limit", "5", "--block", "64")
ARGUMENTS = ("--arg", "u32[1024]=arange", "--arg", "u32[1024]=zeros")
PTX = Kind(
    [
        text.encode()
        for text in (
            AXPY, RACE, NESTED, producer_consumer.TEXT,
            (RECORDINGS / "softmax.sm_90a.ptx").read_text(),
        )
    ],
    mutated_text,
    [
        _carry_out("info"),
        _carry_out("check", *LAUNCH, *ARGUMENTS),
        _carry_out("run", *LAUNCH, *ARGUMENTS[:2]),
    ],
    ERROR,
)  # fmt: skip


def _launch(text: str, block: int) -> bytes:
    data = np.arange(128, dtype=np.uint32)
    module = ptxemu.load(text)
    kernel = module.kernels[0]
    more = (2.0, 64) if kernel == "axpy" else ()
    setup = LaunchSetup(module, kernel, 1, block, (data, data.copy(), *more), GlobalMemory())
    with tempfile.TemporaryDirectory() as folder:
        ptxemu.save_launch(setup, Path(folder, "a.launch"))
        return Path(folder, "a.launch").read_bytes()


def _mutated_launch(draw: random.Random, data: bytes) -> bytes:
    """Change the archive, or a member of it, so that the archive stays whole."""
    if draw.random() < 0.4:
        return mutated_bytes(draw, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice([*members, "header.npy", "header.npy"])
    if draw.random() < 0.3:
        members[name] = mutated_bytes(draw, members[name])
    else:
        content = np.load(io.BytesIO(members[name])).tobytes()
        changed = mutated_bytes if name.startswith("memory") else mutated_text
        file = io.BytesIO()
        np.save(file, np.frombuffer(changed(draw, content), np.uint8))
        members[name] = file.getvalue()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for one, content in members.items():
            archive.writestr(one, content)
    return file.getvalue()


LAUNCHES = Kind(
    [_launch(AXPY, 64), _launch(producer_consumer.TEXT, 128)],
    _mutated_launch,
    [_carry_out("info"), _carry_out("check", "--quiet", "--time-limit", "5")],
    ERROR,
)


def _entry(kind: int, payload: bytes, flags: int, unpacked: int) -> bytes:
    stored = payload + bytes(-len(payload) % 8)
    packed = len(payload) if flags else 0
    return struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(stored), packed, 0, 7, 8, 90, 0, 0, flags, 0,
        unpacked,
    ) + stored  # fmt: skip


def _fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def _literals(text: bytes) -> bytes:
    """An LZ4 block without a match."""
    rest = len(text) - 15
    return bytes([0xF0, *[255] * (rest // 255), rest % 255]) + text


def _mutated_fat(draw: random.Random, data: bytes) -> bytes:
    """Change the numbers at its beginning more often than its texts."""
    if draw.random() < 0.5:
        return mutated_bytes(draw, data[:96]) + data[96:]
    return mutated_bytes(draw, data)


def _choose_ptx(path: Path) -> int:
    """What the driver does with an image; an error is the driver's."""
    try:
        ptx_for(path.read_bytes(), "sm_90a")
    except ImageError:
        return 1
    return 0


TEXT = AXPY.encode() + b"\0"
FAT_BINARIES = Kind(
    [
        _fat(_entry(1, TEXT, 0, 0), _entry(2, b"\x7fELF" + bytes(60), 0, 0)),
        _fat(_entry(1, _literals(TEXT), 0x2000, len(TEXT)), _entry(1, TEXT, 0, 0)),
        b"\x7fELF" + bytes(60) + _fat(_entry(1, TEXT, 0, 0)) + _fat(_entry(1, TEXT, 0, 0)),
    ],
    _mutated_fat,
    [_carry_out("info"), _choose_ptx],
    ERROR,
)
