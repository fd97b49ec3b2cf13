"""Common to the workbench's commands: help, examples, outputs tried before the work."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from flashdsa.cli.extras import say_missing
from flashdsa.cli.output_options import OutputFile, OutputFolder
from flashdsa.plan import BudgetError
from workbench import host
from workbench.__main__ import cli
from workbench.fp16_ranking import KINDS, compare, savings, scores_of
from workbench.host import calls_on, main
from workbench.pretended_gpu import PretendedGpu, pretended_gpu
from workbench.public_calls import PRETENDED
from workbench.reference_plan import ReferencePlan, budgets

OUTPUTS = {
    "draws run forward --out": "x.json",
    "draws report x.json --chart": "x.png",
    "lab majorness --compile-to": "x.so",
    "lab majorness --picture": "x.png",
    "engines vllm --folder": "folder",
    "engines vllm --pack": "packed",
    "engines vllm --out": "x.json",
    "engines sglang --folder": "folder",
    "engines sglang --pack": "packed",
    "engines sglang --out": "x.json",
    "engines speed --folder": "folder",
    "engines speed --out": "x.json",
    "export flashinfer-bench --output": "solutions",
    "launch --save": "launches",
    "sanitize --build-controls": "controls",
    "sanitize --out": "x.json",
    "mutate --rows": "rows",
    "plan mla_bwd --picture": "x.png",
    "tiles --out": "x.json",
    "v4-layer --out": "x.json",
    "ways decode --out": "x.json",
}


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        elif command is not None:
            yield path + name, command


def run(arguments: str) -> click.testing.Result:
    return CliRunner().invoke(cli, arguments.split())


def test_help_teaches_and_its_examples_are_taken() -> None:
    for name, command in commands(cli):
        text = run(f"{name} --help").output
        assert max(map(len, text.splitlines())) <= 80, name
        assert "--json" in text, name
        examples = re.findall(r"^ *python -m workbench (.+)$", text.split("Examples")[1], re.M)
        assert examples, name
        for example in examples:
            words = shlex.split(re.split(r"[|>]|  ", example)[0])[len(name.split()) :]
            command.make_context(name, words)  # raises for an unknown option or value


def test_every_output_is_tried_before_the_work(tmp_path: Path) -> None:
    parameters = [p for _, command in commands(cli) for p in command.params]
    outputs = [p for p in parameters if isinstance(p.type, OutputFile | OutputFolder)]
    assert len(outputs) == len(OUTPUTS)
    in_the_way = tmp_path / "file"
    in_the_way.write_text("as it was")
    for command, name in OUTPUTS.items():
        result = run(f"{command} {in_the_way / name}")
        assert result.exit_code == 2, command
        assert f"{command.split()[-1]}: cannot write " in result.output
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("arguments", ["model nothing", "lab hazards --only nothing"])
def test_a_wrong_input_is_one_line(arguments: str) -> None:
    result = run(arguments)
    assert (result.exit_code == 2 and "Error" in result.output) or "error" in result.output


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        ("plan mla_bwd --picture x.png", "matplotlib"),
        ("inspect x.cubin", "elftools"),
        ("lab precision", "numpy"),
    ],
)
def test_a_package_that_lacks_is_one_line(arguments: str, package: str) -> None:
    """In a process of its own: modules of the tests' have it already."""
    code = f"import sys; sys.modules[{package!r}] = None\nfrom workbench.__main__ import cli; cli()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert say_missing(package) in line


@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**40])
def test_scores_that_fp16_tells_apart_keep_their_sets(scale: float) -> None:
    """Whatever their size: rows are scaled, so that none overflows or vanishes."""
    scores = torch.randperm(2000, generator=torch.Generator().manual_seed(0)).float()
    change = compare(scores.repeat(2, 1) * scale, 100)
    assert (change.sets, change.most, change.tied, change.loss) == (0.0, 0, 1.0, 0.0)


def test_a_pair_at_the_cut_that_fp16_does_not_tell_apart_is_swapped() -> None:
    """Both become 2,048, and the smaller position wins."""
    scores = torch.tensor([[5.0, 2048.0, 2048.5, 4000.0], [1.0, 2.0, 3.0, 4.0]])
    change = compare(scores, 2)
    assert (change.sets, change.ids, change.most, change.tied) == (0.5, 0.5, 1, 1.5)
    assert change.loss == pytest.approx(0.5 / 6048.5)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_scores_are_finite_and_differ(kind: str) -> None:
    scores = scores_of(kind, 2, 320)
    assert scores.shape == (2, 320) and scores.isfinite().all()
    assert scores.unique().numel() > 400


def test_the_command_gives_numbers_of_every_kind_and_shape() -> None:
    given = ["ranking", "--rows", "1", "--tokens", "256", "--topk", "64", "--json"]
    found = json.loads(CliRunner().invoke(cli, given).stdout)
    assert [one["kind"] for one in found["changes"]] == list(KINDS)
    assert all(0 <= one["saved"] < 0.5 for one in found["savings"])
    assert len(found["savings"]) == len(savings())


def test_the_sums_are_the_designs() -> None:
    smem = ReferencePlan(32).smem
    sizes = {region.name: region.bytes for region in smem.regions}
    union = sum(sizes[name] for name in ("kv", "kv_peer", "q_nope", "q_rope"))
    assert (union, sizes["dq"], sizes["sdKV"]) == (110_592, 73_728, 73_728)
    assert (smem.total, smem.capacity) == (194_208, 232_448)
    assert smem.offset("dq") == smem.offset("kv") == 0
    before, after, _ = budgets()
    assert (before.kilobytes, after.kilobytes) == (225.7, 189.7)
    assert (f"{before.share:.1f}", f"{after.share:.1f}") == ("99.4", "83.6")


def test_tensor_memory_is_full_and_of_64_keys_too_small() -> None:
    tmem = ReferencePlan(32).tmem
    assert tmem.allocated == 512 == tmem.column("dO") + 128
    assert tmem.column("dKV_RoPE") == tmem.column("dP") == 352
    with pytest.raises(BudgetError, match=r"dO \[480, 608\)"):
        _ = ReferencePlan(64).tmem


def test_the_command_shows_both() -> None:
    shown = CliRunner().invoke(cli, ["reference"])
    assert shown.exit_code == 0
    for text in ("194,208", "230,148", "-36.0 KB, -15.8 points", "cta_group"):
        assert text in shown.output
    assert CliRunner().invoke(cli, ["reference", "--keys", "64", "--json"]).exit_code == 0


def test_tiles_are_tried_by_processes(tmp_path: Path) -> None:
    out = tmp_path / "tiles.json"
    assert run(f"tiles target --emulated --processes 1 --out {out}").exit_code == 0
    found = json.loads(out.read_text())["kernels"]["target"]
    assert found["failed"] == {} and len(found["rough_us"]) == 2
    assert all(found["today"] in times and len(times) == 3 for times in found["us"].values())


# The last tests here: the pretended GPU stays until they have ended.
FUSED = {"mla_bwd_fused": 1}
"""Large groups and what serves where they do not pay."""


@pytest.fixture(scope="module")
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        pretended.counts = True
        yield pretended


@pytest.fixture(scope="module")
def calls(gpu: PretendedGpu) -> dict[str, Callable[[], object]]:
    return calls_on("cpu", PRETENDED)


def frames(call: Callable[[], object]) -> int:
    """Python functions that a call calls."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("name", "launches", "most_frames"),
    [
        ("sparse_mla_fwd", {"mla_fwd": 1}, 28),
        ("mla_bwd, rows", FUSED, 30),
        ("mla_bwd", {**FUSED, "mla_bwd_sink": 1}, 31),
        ("mla_bwd, deterministic", {**FUSED, "mla_bwd_sink": 1}, 32),
        ("sparse_mla, gradients", {"mla_fwd": 1, **FUSED, "mla_bwd_sink": 1}, 90),
    ],
)
def test_a_call_that_comes_back_launches_little_and_calls_few_functions(
    name: str,
    launches: dict[str, int],
    most_frames: int,
    gpu: PretendedGpu,
    calls: dict[str, Callable[[], object]],
) -> None:
    calls[name]()
    gpu.launches.clear()
    calls[name]()
    assert gpu.launches == launches
    assert frames(calls[name]) - sum(launches.values()) <= most_frames  # the counting itself


@pytest.mark.parametrize("measured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_times_of_two_trees_are_printed(
    measured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To measure takes a process and seconds."""
    times = {"x.add_(1)": (1.0, 2.0), "lse_to_base2": (3.0, 4.0)}
    if not measured:
        monkeypatch.setattr(host, "measure_in_process", lambda *_: times)
    command = ["host", "--pretended", "--only", "lse_to_base2", "--turns", "1"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == [*times]
