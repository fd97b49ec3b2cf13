"""Files of strangers: a clear end, with little memory and in little time, whatever they say."""

import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tests.cli.test_ptxemu_cli import AXPY, HEADER

import ptxemu
from ptxemu.cli.main import main
from ptxemu.cuda.fatbin import ImageError, entries, lz4_block, ptx_for, ptx_of_program
from ptxemu.errors import ModuleError
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.address import PARAM_WINDOW
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.saved_launch_file import _OF_ALLOCATION, _OF_HEADER

N = 64
ENDLESS = (
    HEADER + ".visible .entry k()\n{\n.reg .b32 %r<2>;\nL: add.u32 %r1, %r1, 1;\nbra L;\nret;\n}\n"
)


@pytest.fixture
def saved(tmp_path):
    """A saved launch."""
    arrays = np.arange(N, dtype=np.float32), np.ones(N, dtype=np.float32)
    setup = LaunchSetup(ptxemu.load(AXPY), "axpy", 1, N, (*arrays, 2.0, N), GlobalMemory())
    ptxemu.save_launch(setup, tmp_path / "a.launch")
    return tmp_path / "a.launch"


def members(path):
    """An archive's members, by their names."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path, changed):
    """Write an archive of these members."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in changed.items():
            archive.writestr(name, data)


def array(data):
    """A member: bytes behind NumPy's header."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.frombuffer(data, np.uint8))
    return file.getvalue()


def header_of(path):
    return json.loads(np.load(io.BytesIO(members(path)["header.npy"])).tobytes())


def put_header(path, header):
    text = header if isinstance(header, str) else json.dumps(header)
    rewrite(path, {**members(path), "header.npy": array(text.encode())})


def refused(path, capsys):
    """What `info` and `check` say of a file, the same, in one line."""
    said = set()
    for words in (["info"], ["check", "--quiet"]):
        assert main([*words, str(path)]) == 2
        said.add(capsys.readouterr().err)
    (line,) = said
    assert line.startswith("ptxemu: error: ") and line.count("\n") == 1
    return line


ODD = None, [], {}, "", -1, 1.5, 10**30, "text", [0, 1, 1], [1, 1], ["1", 1, 1], {"x": -1}, True


@pytest.mark.parametrize("field", _OF_HEADER)
def test_a_header_is_held_against_its_table(saved, capsys, field):
    """Values of every kind; those that the table allows are refused later, or change nothing."""
    header = header_of(saved)
    number_refused = 0
    for value in ODD:
        put_header(saved, {**header, field: value})
        code = main(["run", "--quiet", str(saved)])
        said = capsys.readouterr()
        assert code in (0, 1) or (said.err.startswith("ptxemu: error: ") and code == 2)
        number_refused += f"its {field} cannot be" in said.err
    assert number_refused >= 7
    if field != "placed":  # which files of earlier releases lack
        put_header(saved, {name: header[name] for name in header if name != field})
        assert f"its {field} cannot be" in refused(saved, capsys)


@pytest.mark.parametrize("field", _OF_ALLOCATION)
def test_an_allocation_is_held_against_its_table(saved, capsys, field):
    header = header_of(saved)
    for value in (None, [], -1, 1.5, 1 << 64, (1 << 64) - 1, PARAM_WINDOW):
        put_header(saved, {**header, "allocations": [{**header["allocations"][0], field: value}]})
        assert "a.launch: not a launch" in refused(saved, capsys)


@pytest.mark.parametrize(
    "text", ["[" * 200_000, "{", "[]", "7", '{"format": "ptxemu launch"}', "\xff", "NaN"]
)
def test_a_header_that_is_none_is_refused(saved, capsys, text):
    put_header(saved, text)
    assert refused(saved, capsys)


def claim(data, count):
    """The member behind a header that claims so many bytes."""
    file, about = io.BytesIO(), {"descr": "|u1", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue() + data[data.index(b"\n") + 1 :]


@pytest.mark.parametrize("name", ["header", "ptx", "memory_0"])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: claim(data, 20_000_000_000),
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data.replace(b"|u1", b"<f8"),
        lambda data: data.replace(b"|u1", b"|O "),
        lambda data: data[:4],
        lambda data: b"",
        None,
    ],
    ids=["claims more", "cut", "longer", "floats", "objects", "no header", "empty", "missing"],
)
def test_members_are_what_their_headers_say(saved, capsys, name, change):
    """Nothing is allocated for what is not there; `claim` asks for 20 GB."""
    found = members(saved)
    data = found.pop(f"{name}.npy")
    rewrite(saved, found if change is None else {**found, f"{name}.npy": change(data)})
    assert "a.launch: not a launch" in refused(saved, capsys)


def test_a_bomb_of_zeros_is_not_unpacked(saved, capsys):
    found = members(saved)
    rewrite(saved, {**found, "header.npy": array(bytes(3 << 20))})
    assert "header has 3145728 bytes" in refused(saved, capsys)


def test_other_archives_are_refused(saved, capsys):
    data = bytearray(saved.read_bytes())
    data[6] |= 1  # encrypted, says the first member
    at = data.index(b"PK\1\2")
    data[at + 8] |= 1
    saved.write_bytes(data)
    assert "encrypted" in refused(saved, capsys)
    data[6], data[at + 8] = 0, 0
    data[at + 10] = 99  # a method that nobody knows
    saved.write_bytes(data)
    assert "another method" in refused(saved, capsys)


# Fat binaries


def fat(body, header_size=16):
    return struct.pack("<IHHQ", 0xBA55ED50, 1, header_size, len(body)) + body


def entry(stored, entry_header=64, kind=1, flags=0, unpacked=0):
    return struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x101, entry_header, stored, 0, 0, 7, 8, 90, 0, 0, flags, 0,
        unpacked,
    )  # fmt: skip


@pytest.mark.parametrize(
    "image",
    [
        fat(bytes(128)),
        fat(entry(0, 0)),
        fat(entry(0, 63)),
        fat(entry(1 << 62)),
        fat(entry(0, 1 << 31)),
        fat(entry(8) + bytes(7)),
        fat(entry(8, flags=0x2000, unpacked=1 << 60) + bytes(8)),
        fat(entry(8, flags=0x8000, unpacked=1 << 60) + bytes(8)),
        fat(entry(8, flags=0x8000, unpacked=64) + bytes(8)),
        fat(entry(8, flags=0x2000, unpacked=64) + bytes(8)),
        fat(entry(8) + b"\xff" * 8),
        fat(b"", 0),
        fat(b"")[:8],
        fat(b"")[:4],
    ],
)
def test_a_damaged_fat_binary_ends(image, tmp_path, capsys):
    with pytest.raises(ImageError):
        ptx_for(image, "sm_90a")
    assert ptx_of_program(str(_file(tmp_path, image))) == []
    assert main(["info", str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err


def _file(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    return tmp_path / "file"


def test_many_beginnings_of_fat_binaries_take_no_time(tmp_path):
    """Each claims the rest of the file, whose entries end in a damaged one."""
    count = 20_000
    data = b"".join(
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64 * (count - n) - 16) + entry(16)[:48]
        for n in range(count)
    )
    start = time.process_time()
    assert ptx_of_program(str(_file(tmp_path, data))) == []
    assert time.process_time() - start < 20


def test_a_match_is_as_long_as_the_text():
    """A length of 255 a byte would be a gigabyte of 4 MB."""
    block = bytes([0x1F, 65, 1, 0]) + b"\xff" * (4 << 20) + b"\0"
    with pytest.raises(ImageError, match="damaged"):
        lz4_block(block[:-1], 1 << 28)
    assert lz4_block(bytes([0x1F, 65, 1, 0, 255, 255, 0, 0x10, 66]), 100) == b"A" * 100
    assert list(entries(fat(b""))) == []


# Calls


def chain(count, times):
    """Functions that each call the one before."""
    bodies = [
        f".func f{n}()\n{{\n{f'call.uni (), f{n - 1}, ();' * times if n else ''}ret;\n}}\n"
        for n in range(count)
    ]
    kernel = f".visible .entry k()\n{{\ncall.uni (), f{count - 1}, ();\nret;\n}}\n"
    return HEADER + "".join(bodies) + kernel


def circle(count):
    """Functions that each call all of them."""
    calls = "".join(f"call.uni (), f{n}, ();" for n in range(count))
    names = range(count)
    bodies = [f".func f{n}();\n" for n in names] + [
        f".func f{n}() {{ {calls} ret; }}\n" for n in names
    ]
    return HEADER + "".join(bodies) + ".visible .entry k() { call.uni (), f0, (); ret; }\n"


@pytest.mark.parametrize("text", [chain(40, 2), circle(25)], ids=["twice", "circle"])
def test_calls_that_multiply_are_refused(text, monkeypatch):
    monkeypatch.setattr("ptxemu.syntax.inlining.MOST_COPIED", 20_000)
    with pytest.raises(ModuleError, match=r"f\d+: its calls are inlined, .* than 20,000 instr"):
        ptxemu.load(text)


def test_calls_may_nest_deeply_and_repeat():
    deep = ptxemu.load(chain(600, 1)).syntax.functions["k"].instructions
    assert len(deep) == 601
    wide = ptxemu.load(chain(10, 2)).syntax.functions["k"].instructions
    assert len(wide) == 2**10


# The command line


@pytest.mark.parametrize("space", [".global", ".const", ".shared"])
def test_a_variable_beyond_all_memory_is_one_line(tmp_path, capsys, space):
    variable = f"{space} .align 4 .b8 big[100000000000000];\n"
    text = HEADER + variable + ".visible .entry k() { .reg .b64 %rd<2>; mov.u64 %rd1, big; ret; }\n"
    assert main(["run", "--quiet", str(_file(tmp_path, text.encode()))]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("error", [MemoryError(), RecursionError(), MemoryError("for an array")])
def test_limits_of_python_are_one_line(tmp_path, capsys, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("ptxemu.cli.info_command._load", fail)
    assert main(["info", str(_file(tmp_path, AXPY.encode()))]) == 2
    said = capsys.readouterr().err
    assert said.startswith("ptxemu: error: ") and said.count("\n") == 1


READING_SECONDS = 1.0
"""CPU time after which a command reads PTX; it starts in a third of that."""


def cpu_seconds(process):
    times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def run(tmp_path, *words, text, number=None):
    """Run a command in a process of its own; a signal comes while it reads."""
    path = _file(tmp_path, text.encode())
    command = [sys.executable, "-m", "ptxemu", *words[:1], str(path), *words[1:]]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        if number is not None:
            while cpu_seconds(process) < READING_SECONDS:
                time.sleep(0.02)
            assert process.poll() is None
            process.send_signal(number)
        _, said = process.communicate(timeout=60)
    return process.returncode, said


SLOW_TO_READ = chain(400, 1).replace("ret;", "membar.cta;" * 30 + "ret;")
"""Takes ten seconds and more to read."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["info", "trace", "mutate", "run"])
def test_signals_give_their_codes(tmp_path, command, number):
    words = [command] if command == "info" else [command, "--quiet"]
    code, said = run(tmp_path, *words, text=SLOW_TO_READ, number=number)
    reason = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
    assert (code, said) == (128 + number, f"ptxemu: {reason}\n")


def test_the_time_limit_counts_while_ptx_is_read(tmp_path):
    code, said = run(tmp_path, "run", "--quiet", "--time-limit", "1", text=SLOW_TO_READ)
    assert (code, said) == (124, "ptxemu: stopped, as --time-limit 1 says\n")


def test_arrays_that_are_half_done_are_not_saved(tmp_path, capsys):
    text = ENDLESS.replace("k()", "k(.param .u64 x)")
    words = ["--quiet", "--time-limit", "0.3", "--arg", "f32[4]=zeros"]
    path = str(_file(tmp_path, text.encode()))
    code = main(["run", path, *words, "--block", "32", "--save", str(tmp_path / "out")])
    assert code == 124 and not list((tmp_path / "out").glob("*"))
    assert "the arrays are not saved" in capsys.readouterr().out


def test_control_characters_reach_no_terminal(tmp_path, capsys):
    """Of a path in a finding, and of a name in an error."""
    race = HEADER + (
        '.file 1 "\x1b]0;title\x07\x9b\u202e.cu"\n.visible .entry k(.param .u64 x)\n{\n'
        ".reg .b32 %r<3>; .reg .b64 %rd<2>; .loc 1 5 1\nld.param.u64 %rd1, [x];\n"
        "mov.u32 %r1, %ctaid.x;\nst.global.u32 [%rd1], %r1;\nret;\n}\n"
    )
    path = str(_file(tmp_path, race.encode()))
    options = ["--grid", "2", "--block", "1", "--arg", "u32[1]=zeros"]
    assert main(["check", "--quiet", path, *options]) == 1
    said = capsys.readouterr()
    assert main(["info", str(tmp_path / "no\x1b[2Jfile\udcff")]) == 2
    text = said.out + said.err + capsys.readouterr().err
    assert r"\x1b]0;title\x07\x9b\u202e.cu" in text and r"no\x1b[2Jfile\udcff" in text
    assert not {c for c in text if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160)}
    text.encode()
