"""The command line: what it prints, and its exit codes."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from ptxemu.cli import nvcc_command
from ptxemu.cli.argument_spec import parse
from ptxemu.cli.main import main
from ptxemu.cuda import nvcc, script

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"
AXPY = (
    HEADER
    + """
.visible .entry axpy(.param .u64 x, .param .u64 y, .param .f32 a, .param .u32 n)
{
  .reg .pred %p; .reg .b32 %r<6>; .reg .b64 %rd<6>; .reg .f32 %f<4>;
  ld.param.u64 %rd1, [x];
  ld.param.u64 %rd2, [y];
  ld.param.f32 %f1, [a];
  ld.param.u32 %r1, [n];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p, %r5, %r1;
  @%p bra DONE;
  mul.wide.u32 %rd3, %r5, 4;
  add.s64 %rd4, %rd1, %rd3;
  add.s64 %rd5, %rd2, %rd3;
  ld.global.f32 %f2, [%rd4];
  ld.global.f32 %f3, [%rd5];
  fma.rn.f32 %f3, %f2, %f1, %f3;
  st.global.f32 [%rd5], %f3;
DONE:
  ret;
}
"""
)
RACE = (
    HEADER
    + """
.visible .entry race(.param .u64 y)
.reqntid 64, 1, 1
{
  .reg .b32 %r<4>; .reg .b64 %rd<4>; .shared .align 4 .b8 buffer[256];
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %tid.x;
  shl.b32 %r2, %r1, 2;
  mov.u32 %r3, buffer;
  add.u32 %r2, %r2, %r3;
  st.shared.u32 [%r2], %r1;
  ld.shared.u32 %r1, [buffer];
  st.global.u32 [%rd1], %r1;
  ret;
}
"""
)


@pytest.fixture
def axpy(tmp_path):
    return written(tmp_path, AXPY)


def written(folder, text):
    path = folder / "kernel.ptx"
    path.write_text(text)
    return str(path)


LAUNCH = ["--grid=4", "--block=32"]


def axpy_arguments(n=100):
    return ["--arg=f32[100]=arange", "--arg=f32[100]=ones", "--arg=f32=2", f"--arg=u32={n}"]


def test_run_says_what_became_of_the_arrays(axpy, capsys, tmp_path):
    code = main(["run", axpy, *LAUNCH, *axpy_arguments(), f"--save={tmp_path / 'out'}"])
    out = capsys.readouterr().out
    assert code == 0
    assert "argument 0 f32[100]: 0 of 100 changed" in out
    assert "argument 1 f32[100]: 99 of 100 changed, min 1, max 199" in out
    assert out.rstrip().endswith("not checked")
    saved = np.load(tmp_path / "out" / "arg1.npy")
    assert np.array_equal(saved, 2 * np.arange(100) + 1)


def test_check_of_a_correct_kernel_finds_nothing(axpy, capsys):
    assert main(["check", axpy, *LAUNCH, *axpy_arguments()]) == 0
    assert capsys.readouterr().out.rstrip().endswith("0 errors, 0 warnings, 0 notes")


def test_check_reports_a_race_with_exit_code_1(tmp_path, capsys):
    assert main(["check", written(tmp_path, RACE), "--arg", "u32[1]=zeros"]) == 1
    assert re.search(r"error: race: .*PTX line 14\b.*PTX line 15\b", capsys.readouterr().out)


def test_check_as_json(tmp_path, capsys):
    assert main(["check", written(tmp_path, RACE), "--arg", "u32[1]=zeros", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    errors = {f["code"] for f in facts["findings"] if f["level"] == "error"}
    assert errors == {"race"}
    assert facts["launches"][0]["block"] == [64, 1, 1]
    assert facts["arrays"][0]["shape"] == [1]


def test_an_access_out_of_bounds_is_a_failure_of_the_kernel(axpy, capsys):
    code = main(["check", axpy, *LAUNCH, *axpy_arguments(n=101)])
    out = capsys.readouterr().out
    assert code == 1
    assert "failed: kernel axpy" in out and "behind the end of argument 0" in out


def test_info_lists_the_kernel(axpy, capsys):
    assert main(["info", axpy, "--opcodes"]) == 0
    out = capsys.readouterr().out
    assert "kernel axpy" in out and "parameter 2: .f32 a, 4 bytes" in out
    assert "every instruction is known" in out
    assert re.search(r"\b3  mov\.u32", out)


def test_info_names_what_is_missing_with_exit_code_1(tmp_path, capsys):
    text = AXPY.replace("fma.rn.f32 %f3", "frobnicate.rn.f32 %f3")
    assert main(["info", written(tmp_path, text)]) == 1
    out = capsys.readouterr().out
    assert "MISSING frobnicate.rn.f32: unknown instruction (1 times; line 23)" in out
    assert main(["info", written(tmp_path, text), "--json"]) == 1
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert [entry["opcode"] for entry in kernel["missing"]] == ["frobnicate.rn.f32"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (axpy_arguments(), "--block: needed"),
        (["--block", "32"], "axpy has 4 parameters, 0 given"),
        (["--block", "2048", *axpy_arguments()], "block: at most 1024"),
        (["--block", "32", "--kernel", "other"], "expected one of axpy; got 'other'"),
        (["--block", "32", "--arg", "f33[4]=zeros"], "expected a type"),
        (["--block", "32", "--arg", "f32[4]=many"], "expected random, zeros"),
        (["--block", "32", "--arg", "f32[0]=zeros"], "expected positive numbers"),
        (["--block", "32", "--arg", "u8=300"], "300 does not fit u8"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(axpy, capsys, arguments, message):
    assert main(["run", axpy, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ptxemu: error: ") and message in error
    assert error.count("\n") == 1


def test_a_file_that_is_not_ptx_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main(["info", written(tmp_path, "int main() {}")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_seeds_give_the_same_arrays_again():
    one, two = (parse("f32[8]=random", np.random.default_rng(3)).array for _ in range(2))
    assert np.array_equal(one, two)


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        ("bf16[3]=1.5", [1.5, 1.5, 1.5]),
        ("e4m3[2]=ones", [1.0, 1.0]),
        ("e5m2[2]=-2", [-2.0, -2.0]),
        ("f16[4]=arange", [0, 1, 2, 3]),
        ("i64[2,2]=arange", [0, 1, 2, 3]),
    ],
)
def test_arrays_hold_the_numbers_asked_for(spec, numbers):
    argument = parse(spec, np.random.default_rng(0))
    assert argument.numbers().reshape(-1).tolist() == numbers


@pytest.mark.parametrize(
    ("spec", "packed"),
    [
        ("i32=-1", b"\xff\xff\xff\xff"),
        ("u64=0x10", b"\x10" + bytes(7)),
        ("f32=1", b"\x00\x00\x80\x3f"),
        ("bf16=1", b"\x80\x3f"),
        ("bytes[4]=0102", b"\x01\x02\x00\x00"),
    ],
)
def test_numbers_and_structs_are_packed(spec, packed):
    assert parse(spec, np.random.default_rng(0)).value == packed


def test_arrays_come_from_files(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1, 2], [3, 4]], dtype=np.int32))
    argument = parse(f"i32[4]=@{tmp_path}/x.npy", np.random.default_rng(0))
    assert argument.array.tolist() == [1, 2, 3, 4]


def test_a_tensor_map_describes_its_array():
    argument = parse("map:f32[8,32]=arange;box=4,16;swizzle=64B", np.random.default_rng(0))
    assert len(argument.value) == 128
    assert int.from_bytes(argument.value[:8], "little") == argument.array.ctypes.data


@pytest.mark.parametrize(
    ("command", "wrong"),
    [("info", "not text but bytes; expected"), ("exec", "not a program that may be executed")],
)
def test_a_file_that_is_of_another_kind_is_named_with_what_it_is(
    command: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(b"\x7fELF\x02\x01\x80\xff")
    for path, said in (
        (binary, wrong),
        (tmp_path, "a folder; expected a file of"),
        (tmp_path / "none.ptx", "no such file"),
    ):
        assert main([command, str(path)]) == 2
        assert f"ptxemu: error: {path}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["check", "k.ptx", "--block", "0"], ["run"], ["frobnicate"], []])
def test_a_wrong_command_line_is_one_line_and_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "--help)" in error


@pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
@pytest.mark.parametrize("command", ["check", "run", "trace", "mutate"])
def test_another_architecture_is_refused_before_nvcc(command, arch, tmp_path, monkeypatch, capsys):
    source = tmp_path / "kernel.cu"
    source.write_text("int main() {}")
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: pytest.fail("nvcc was looked for"))
    assert main([command, "--arch", arch, str(source)]) == 2
    assert f"got {arch!r}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["# flashdsa\n\nKernels; for PyTorch.\n", "\n {}\n"])
def test_a_text_that_is_no_ptx_is_asked_about_by_its_beginning(text, tmp_path, capsys):
    assert main(["check", written(tmp_path, text)]) == 2
    assert f"is this PTX? It begins with {text.split(chr(10))[0].strip() or '{}'!r}" in (
        capsys.readouterr().err
    )


def test_nvcc_gets_its_own_options(monkeypatch, capfd):
    monkeypatch.setattr(nvcc_command, "find_nvcc", lambda: ("echo", ["-Iinclude"]))
    assert main(["nvcc", "-gencode", "arch=a,code=b", "--help", "-o", "x", "--", "y"]) == 0
    assert capfd.readouterr().out == "-Iinclude -gencode arch=a,code=b --help -o x -- y\n"


@pytest.mark.parametrize("columns", [60, 90])
def test_a_report_is_folded_on_a_terminal_only(columns, tmp_path, monkeypatch, capsys):
    command = ["check", written(tmp_path, RACE), "--arg", "u32[1]=zeros", "--quiet"]
    main(command)
    whole = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(command)
    report = capsys.readouterr().out
    assert max(map(len, report.splitlines())) <= columns < max(map(len, whole.splitlines()))
    words, of_whole = (re.sub("0x[0-9a-f]+", "", text).split() for text in (report, whole))
    assert words == of_whole


def test_a_script_names_the_extra_with_what_it_imports(tmp_path, monkeypatch):
    monkeypatch.setitem(script._EXTRAS, "no_such_module", "triton")
    path = tmp_path / "script.py"
    path.write_text("import no_such_module.language as tl\n")
    error = script.run_script([], str(path), []).error
    assert error.endswith("brings it: ptxemu[triton]\n") and "ModuleNotFoundError" in error
