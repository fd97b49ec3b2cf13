"""`ptxemu mutate` on the command line."""

import json

from ptxemu.cli.main import main
from tests import producer_consumer

LAUNCH = ["--block", "128", "--arg", "u32[128]=arange", "--arg", "u32[128]=zeros", "--quiet"]


def write(folder):
    path = folder / "kernel.ptx"
    path.write_text(producer_consumer.TEXT)
    return str(path)


def test_survivors_are_listed_with_their_line_and_set_the_exit_code(tmp_path, capsys):
    code = main(["mutate", write(tmp_path), *LAUNCH, "--only", "group-wait", "--jobs", "1"])
    out = capsys.readouterr().out
    line = producer_consumer.line_of("wait_group")
    assert code == 1
    assert f"group-wait#1 .read: PTX line {line}: cp.async.bulk.wait_group 0" in out


def test_explained_survivors_do_not(tmp_path, capsys):
    known = tmp_path / "known.txt"
    known.write_text(f"{producer_consumer.line_of('wait_group')} .read: the kernel ends\n")
    report = ["--json", "-", "--equivalent", str(known)]
    code = main(["mutate", write(tmp_path), *LAUNCH, "--jobs", "2", *report])
    (kernel,) = json.loads(capsys.readouterr().out)
    assert code == 0
    assert kernel["share"] == 1.0
    assert {m["verdict"] for m in kernel["mutants"]} == {"caught", "equivalent"}


def test_an_explanation_of_what_the_kernel_does_not_have_is_named(tmp_path, capsys):
    known = tmp_path / "known.txt"
    known.write_text("group-wait#1 .read: it ends\n# a comment\nbarrier#9 *: gone # since then\n")
    code = main(
        ["mutate", write(tmp_path), *LAUNCH, "--only", "group-wait", "--equivalent", str(known)]
    )
    told = capsys.readouterr()
    assert code == 0
    assert told.err == f"{known}: k has no mutant 'barrier#9 *'\n"
    assert "-- it ends" in told.out


def test_progress_goes_to_stderr(tmp_path, capsys):
    loud = [option for option in LAUNCH if option != "--quiet"]
    main(["mutate", write(tmp_path), *loud, "--only", "barrier", "--jobs", "1"])
    assert "3 of 3 mutants, 3 caught" in capsys.readouterr().err


def test_a_target_is_needed(capsys):
    assert main(["mutate", "--quiet"]) == 2
    assert "--exec" in capsys.readouterr().err
