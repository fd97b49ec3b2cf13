"""`flashdsa choose`: what it says of sizes is what a call of these sizes does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import click
import pytest
import torch
from click.testing import CliRunner, Result

import flashdsa
from flashdsa.backends.emulated.devices import A100, B200, H200
from flashdsa.backends.emulated.runner import running_on
from flashdsa.backends.recorder import Recorder
from flashdsa.backends.sm90 import sparse_mla_ways
from flashdsa.cli import choose
from flashdsa.heuristics.h200 import Indexer
from flashdsa.kernels.catalog import KERNELS
from flashdsa.plan.kernel_spec import find_kernel
from tests.support.subtests import CaseLoop
from workbench.__main__ import cli as workbench

Run = Callable[..., Result]


def asked(run: Run, line: str) -> dict[str, Any]:
    """The document of `flashdsa choose LINE --json`."""
    done = run("choose", *line.split(), "--json")
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def kernels_of(document: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(launch["kernel"] for launch in document["launches"]))


def reasons_of(document: dict[str, Any]) -> str:
    return " | ".join(
        f"{x['kind']}: {x['reason']}" for y in document["choices"] for x in y["candidates"]
    )


@pytest.mark.parametrize(
    ("line", "kernels"),
    [
        ("sparse_mla --queries 64 --format v32", "mla_decode_packed_single_cta"),
        ("sparse_mla --queries 64 --format v32 --lengths", "mla_decode_stream_k_packed"),
        ("sparse_mla --queries 64 --format v4", "mla_decode_v4"),
        ("sparse_mla --queries 4096", "mla_used_slots mla_fwd_drawn"),
        ("sparse_mla --queries 128 --d-qk 512 --max-logits --lengths", "mla_fwd_512"),
        ("sparse_mla --queries 8 --d-qk 512 --extra-keys 9000 --extra-range --lengths",
         "mla_decode_512_joined"),
        ("sparse_mla --queries 8 --format v41 --extra-keys 9000 --extra-format v41_fp4",
         "mla_decode_v41_and_v41_fp4_joined"),
        ("sparse_mla --queries 8 --format v41_fp4_interleaved --extra-keys 9000 --extra-format "
         "v41_interleaved", "mla_decode_v41_interleaved_and_v41_fp4_interleaved_joined"),
        ("sparse_mla --queries 8 --range --keys 200 --lengths", "mla_decode_joined"),
        ("sparse_mla --queries 8 --index-block 4 --lengths", "mla_decode_joined"),
        ("sparse_mla --queries 8 --batch-invariant --lengths", "mla_fwd"),
        ("sparse_mla --backend triton", "valid_ids forward"),
        ("sparse_mla --backend triton --queries 1 --dtype fp16", "forward merge"),
        ("sparse_mla --dtype fp32", ""),
        ("sparse_mla --gpu b200", "sm100_mla_fwd"),
        ("mla_bwd", "mla_bwd_fused_group1_tickets mla_bwd_scores mla_bwd_dq_blocks4"),
        ("mla_bwd --sink --queries 200 --deterministic", "mla_bwd_fused_group1_slots"),
        ("mla_bwd --gpu a100", "row_products valid_ids of_queries of_rows"),
        ("dsa_topk_indexer --next-n 2", "indexer_logits_h64_pairs rank_cache"),
        ("dsa_topk_indexer --heads 16 --mxfp4 --ids position", "indexer_logits_h16"),
        ("dsa_topk_indexer --block 8", "indexer_logits_h64_blocks rank_blocks"),
        ("dsa_topk_indexer --topk 4096", "score select"),
        ("dsa_topk_prefill", "prefill_h64_fp8"),
        ("dsa_topk_prefill --starts --sorted --dtype bf16", "prefill_logits_h64_bf16"),
        ("dsa_topk_prefill --block 8 --candidates 100", "prefill_logits_h64_fp8"),
        ("attention_target --sink", "attention_target_h128"),
        ("indexer_scores --lengths", "indexer_scores_h64"),
        ("indexer_bwd --deterministic", "indexer_bwd_h64_group2_ordered"),
    ],
)  # fmt: skip
def test_the_kernels_of_a_call_are_named(run: Run, line: str, kernels: str) -> None:
    document = asked(run, line)
    wanted, found = kernels.split(), kernels_of(document)
    assert [name[: len(x)] for name, x in zip(found, wanted, strict=False)] == wanted, found
    assert bool(found) == bool(wanted)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sparse_mla --format v32 --d-qk 512", "packed rows of 656 bytes (v32) are of 576 columns"),
        ("sparse_mla --format v4 --d-qk 576 --queries 8", "(v4) are of 512 columns"),
        ("mla_bwd --topk 100000000000", "indices: no GPU has room for 1.6e+15 bytes"),
        ("mla_bwd --topk 3000000000 --queries 1", "indices: expected at most 2147483647 slots"),
        ("sparse_mla --format v4 --max-logits --backend sm90", "max_logits and kv_format v4"),
        ("dsa_topk_indexer --topk 4096 --backend sm90", "topk: takes 1 to 2048; got 4096"),
        ("dsa_topk_indexer --next-n 5", "expected next_n of 1 to 4"),
        ("dsa_topk_prefill --block 3", "block: expected a divisor of 64; got 3"),
        ("mla_bwd --dtype fp16 --backend sm90", "dtype: takes bfloat16; got float16"),
        ("sparse_mla --backend sm100 --gpu h200", "compute capability: takes 10.0 or 10.3"),
        ("sparse_mla --range --index-block 4", "index_block: expected 1"),
    ],
)
def test_a_call_that_nobody_serves_is_refused(run: Run, line: str, says: str) -> None:
    """In the words of the operation or of the registry, with exit code 2."""
    for json_too in ([], ["--json"]):
        done = run("choose", *line.split(), *json_too)
        assert done.exit_code == 2 and not done.stdout
        assert says in done.stderr and done.stderr.count("\n") == 1


def test_calls_beyond_hoppers_limits_go_elsewhere(run: Run) -> None:
    """topk 4,096 goes to Triton, and 100,000 to torch; the answer says why not to Hopper."""
    for topk, backend in ((4096, "triton"), (100_000, "torch")):
        document = asked(run, f"dsa_topk_indexer --topk {topk} --tokens 1000")
        assert document["backend"] == backend
        assert document["refusals"]["sm90"] == f"topk: takes 1 to 2048; got {topk}"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sparse_mla --lengths", "stream-K: not considered: more than 858 items of 64 heads"),
        ("sparse_mla --queries 8", "clusters: rule: 16 items of 64 heads are no more than the 132"),
        ("sparse_mla --queries 64 --format v32 --lengths", "as it must take 1.05 of another's"),
        ("sparse_mla --heads 16", "the device chooses by a sample of the lists"),
        ("sparse_mla --batch-invariant", "batch_invariant: no other kernel"),
        ("mla_bwd", "groups of 2 queries if the device finds that they share keys: lists at most "
                    "1.16 times as long as one query's in the mean, none above 3072 keys"),
        ("mla_bwd --queries 200 --deterministic", "added up in their order: deterministic"),
        ("mla_bwd --heads 136", "heads 128 to 135: no groups of 256 rows: they pay for 64 or 128"),
        ("mla_bwd --queries 200 --d-qk 512", "CTAs draw their items"),
        ("dsa_topk_indexer", "rule: 32 rows, below 61: up to 8 CTAs"),
        ("dsa_topk_indexer --next-n 2", "rule: 2 queries a request"),
        ("dsa_topk_indexer --tokens 2048", "32 pages of 64 tokens hold no more than topk"),
        ("dsa_topk_indexer --tokens 2048 --sorted", "few rows of a table that is not too wide"),
        ("dsa_topk_prefill", "1 launch: 1.00 of the estimated time of CTAs alone"),
        ("indexer_bwd", "groups of 4 queries: larger groups if the device finds lists at most 1.7"),
        ("indexer_bwd --heads 16", "smaller groups: fewer than 64 heads"),
    ],
)  # fmt: skip
def test_the_reasons_are_said(run: Run, line: str, says: str) -> None:
    document = asked(run, line)
    assert says in reasons_of(document)
    (text,) = [run("choose", *line.split()).output]
    assert " ".join(says.split(": ")[-1].split()) in " ".join(text.split())
    for choice in document["choices"]:
        taken = [x for x in choice["candidates"] if x["taken"]]
        assert len(taken) == 1 or choice["title"].startswith("parts of the call")
        assert choice["candidates"][0] == taken[0]


def test_reasons_follow_the_constants_that_decide(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other constants, other reasons: no rule is written twice."""
    other = replace(sparse_mla_ways.SPARSE_MLA, most_stream_k_turns=5.0)
    monkeypatch.setattr(sparse_mla_ways, "SPARSE_MLA", other)
    monkeypatch.setattr(sparse_mla_ways.weigh, "__defaults__", (other,))
    assert "more than 660 items" in reasons_of(asked(run, "sparse_mla --lengths"))
    monkeypatch.setattr(Indexer, "MANY_ROWS", 0.1)
    assert "32 rows, no fewer than 13" in reasons_of(asked(run, "dsa_topk_indexer"))


def test_names_are_those_of_plan_and_inspect(subtests: CaseLoop, run: Run) -> None:
    for line in ("sparse_mla", "sparse_mla --queries 64 --format v32", "mla_bwd",
                 "dsa_topk_indexer", "dsa_topk_prefill", "indexer_bwd"):  # fmt: skip
        document = asked(run, line)
        for name in kernels_of(document):
            with subtests.test(name):
                variant = find_kernel(KERNELS, name)  # as `inspect` does
                assert variant.name == name
                if variant.plan.roles:
                    shown = CliRunner().invoke(workbench, ["plan", name]).output
                    assert shown.startswith(variant.spec.name)
        if line.startswith(("sparse_mla", "mla_bwd")):
            (taken,) = (x["kernels"] for x in document["choices"][0]["candidates"] if x["taken"])
            assert all(name in taken for name in kernels_of(document))


def test_tables_fit_80_columns(subtests: CaseLoop, run: Run) -> None:
    for name, command in choose.choose.commands.items():
        for more in ("", "--backend triton", "--gpu b200"):
            with subtests.test(f"{name} {more}"):
                done = run("choose", name, *more.split())
                assert done.exit_code == 0 and isinstance(command, click.Command)
                assert max(map(len, done.output.splitlines())) <= 80


SIZES: dict[str, tuple[object, ...]] = {
    "--queries": (1, 3, 20), "--heads": (1, 16, 24, 64, 128, 136), "--topk": (1, 64, 512, 2049),
    "--keys": (1, 100, 3000), "--d-qk": (300, 512, 576), "--extra-keys": (1, 500),
    "--extra-topk": (1, 70), "--index-block": (1, 3, 4), "--requests": (1, 5, 30),
    "--next-n": (1, 2, 3, 5), "--tokens": (64, 1000, 9000), "--table-page-size": (1, 16, 48, 64),
    "--block": (1, 8, 7), "--candidates": (1, 40),
}  # fmt: skip

ALWAYS = ("--queries", "--keys", "--topk", "--tokens")
"""Options whose usual sizes are too large for tensors with values."""


def drawn(draw: random.Random, command: click.Command) -> list[str]:
    """Options of a command: all sizes, others now and then; wrong ones among them."""
    line: list[str] = []
    for option in command.params:
        name = option.opts[0]
        is_left_out = draw.random() < 0.6 and name not in ALWAYS
        if is_left_out or name in ("--json", "--gpu", "--backend"):
            continue
        if isinstance(option, click.Option) and option.is_flag:
            line.append(name)
        elif isinstance(option.type, click.Choice):
            line += [name, draw.choice(list(option.type.choices))]
        else:
            line += [name, str(draw.choice(SIZES[name]))]
    return line


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """In this context the command's tensors have values, all 0."""
    with patch.object(torch, "empty", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype)):
        yield


def call_made(name: str, line: list[str], backend: str) -> tuple[str, list[str]]:
    """(error, kernels launched) of a real call of these options, on a runner without kernels."""
    command, recorder = choose.choose.commands[name], Recorder(GPUS[backend][1])
    given = {**command.make_context(name, [*line]).params}
    for option in ("gpu", "backend", "as_json"):
        given.pop(option)
    try:
        with on_the_cpu():
            operands, more = choose.ARGUMENTS[name](choose.Given(**given))
        function = "sparse_mla_fwd" if name == "sparse_mla" else name
        with running_on(recorder):
            getattr(flashdsa, function)(*operands, backend=f"emulate-{backend}", **more)
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error).replace("emulate-", ""), []
    return "", list(dict.fromkeys(launch.kernel for launch in recorder.launches))


GPUS = {"sm90": ("h200", H200), "triton": ("a100", A100), "sm100": ("b200", B200)}


@pytest.mark.parametrize("backend", GPUS)
@pytest.mark.parametrize("name", list(choose.choose.commands))
def test_it_answers_as_a_call_does(subtests: CaseLoop, run: Run, name: str, backend: str) -> None:
    """What a real call refuses is refused in the same words; else the same kernels are named."""
    draw = random.Random(f"{name}, {backend}")
    refused, served, more = set(), 0, ("--gpu", GPUS[backend][0])
    for _ in range(16):
        line = drawn(draw, choose.choose.commands[name])
        with subtests.test(" ".join(line)):
            error, kernels = call_made(name, line, backend)
            done = run("choose", name, *line, "--backend", backend, *more, "--json")
            assert done.exit_code == (2 if error else 0), (error, done.output)
            if error:
                refused.add(error)
                assert " ".join(error.split()) in done.stderr
            else:
                served += 1
                assert kernels_of(json.loads(done.stdout)) == kernels
    assert refused and (served or backend == "sm100")
