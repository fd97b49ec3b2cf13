"""`python -m workbench engines`: serving engines beside transformers, on one GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table
from flashdsa.cli.output_options import OutputFile, OutputFolder
from flashdsa.output_paths import written

FOLDER = click.option(
    "--folder", type=OutputFolder(), default=Path("out/engines"), show_default=True,
    help="Checkpoint and answers, kept there.",
)  # fmt: skip
PACK = click.option(
    "--pack", "pack_to", type=OutputFolder(), help="Only pack the engine into this folder."
)
PACKED = click.option(
    "--packed", type=click.Path(path_type=Path), help="Run the engine from this folder of --pack."
)
JOBS = click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True,
    help="Processes side by side; several GPUs take turns.",
)  # fmt: skip
OUT = click.option("--out", type=OutputFile(".json"), help="Write the document there, too.")
CALLS_OF_VLLM = ("attend", "dsa_topk_indexer", "dsa_topk_prefill", "left to vLLM")
CALLS_OF_SGLANG = ("sparse_mla_fwd", "dsa_topk_indexer", "dsa_topk_prefill")


@click.group()
def engines() -> None:
    """Run serving engines with flashdsa inside, beside their own kernels and transformers."""


@engines.command()
@click.argument("backends", nargs=-1)
@click.option(
    "--case", "cases", multiple=True,
    help="graphs, eager, chunked, drafts, prefix, fp8, server, tp2, or several joined by +; may be "
    "repeated.  [default: all but tp2, one by one]",
)  # fmt: skip
@FOLDER
@PACK
@PACKED
@JOBS
@OUT
@json_option
def vllm(
    backends: tuple[str, ...],
    cases: tuple[str, ...],
    folder: Path,
    pack_to: Path | None,
    packed: Path | None,
    jobs: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Generate 16 tokens for four prompts with vLLM, beside transformers' eager model.

    The model is a random DeepSeek-V3.2 with real head sizes and two layers; the
    prompts have 40, 700, 2,500 and 5,000 tokens. BACKENDS are vLLM's names of
    attention backends; by default both of flashdsa, and FLASHMLA_SPARSE. Each
    runs in a process of its own, whose output FOLDER keeps. Prompts go to the
    backend whatever their length (sparse_mla_force_mqa). Exit code 1 if a run
    fails, or if a token differs from eager's where the two best are further apart
    than twice bf16's error, which is measured against fp32; with fp8 four times as
    far.

    \b
    Cases
      graphs    vLLM's settings: CUDA graphs, prompts whole, bf16 cache
      eager     no CUDA graphs
      chunked   2,048 tokens a batch: parts of prompts among decodes
      drafts    two drafted tokens (MTP) from a random layer
      prefix    prefix caching, all prompts twice
      fp8       a cache of packed rows (fp8_ds_mla)
      server    vllm serve, asked for the four prompts at once
      tp2       two GPUs share the heads; calls are not counted

    \b
    Columns
      equal     tokens up to the first other one, of each prompt, and there the
                gap of eager's two best log-probabilities
      calls     attention, index of decodes, of prompts, left to vLLM's indexer

    --pack needs network, CuTe DSL and gcc, no GPU, and takes ten minutes. Its
    archives (vLLM 0.33 and kernels for Hopper; Python 3.12, torch 2.11,
    transformers 5.17 and nvcc are there) and this checkout go to the machine.

    \b
    Examples
      python -m workbench engines vllm --pack packed
      python -m workbench engines vllm --packed packed --out vllm.json
      python -m workbench engines vllm FLASHDSA_MLA_SPARSE --case eager+fp8
    """
    if pack_to is not None:
        _pack(pack_to, "VLLM", as_json)
        return
    from workbench.engines import vllm_run

    path = _unpacked(packed, folder, "VLLM")
    result = vllm_run.measure(
        backends or vllm_run.BACKENDS,
        cases or tuple(case for case in vllm_run.CASES if case != "tp2"),
        folder,
        lambda words, gpu: vllm_run.in_a_process(words, gpu, path, _log(folder, words)),
        _tell,
        jobs,
    )
    _report(result, CALLS_OF_VLLM, out, as_json)


@engines.command()
@click.argument("plugins", nargs=-1)
@click.option(
    "--case", "cases", multiple=True,
    help="graphs, eager, chunked, prefix, fp8, or several joined by +; may be repeated.  "
    "[default: all, one by one]",
)  # fmt: skip
@FOLDER
@PACK
@PACKED
@JOBS
@OUT
@json_option
def sglang(
    plugins: tuple[str, ...],
    cases: tuple[str, ...],
    folder: Path,
    pack_to: Path | None,
    packed: Path | None,
    jobs: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Generate 16 tokens for four prompts with SGLang, beside transformers' eager model.

    The model, the prompts and the verdicts are those of `engines vllm`. PLUGINS
    are values of SGLANG_PLUGINS: none for SGLang's own FlashMLA and indexer,
    flashdsa, and flashdsa,flashdsa_indexer; by default all three.

    \b
    Cases
      graphs    CUDA graphs, prompts whole, bf16 cache, flashmla_sparse
      eager     no CUDA graphs
      chunked   2,048 tokens a batch of prompts
      prefix    the radix cache, all prompts twice
      fp8       a cache of packed rows, flashmla_kv

    \b
    Columns
      equal     tokens up to the first other one, of each prompt, and there the
                gap of eager's two best log-probabilities
      calls     attention, index of decodes, of prompts by flashdsa

    --pack needs network, CuTe DSL and gcc, no GPU. Its archives (SGLang 0.5.13
    and kernels for Hopper; Python 3.12, torch 2.11 and nvcc are there) and this
    checkout go to the machine.

    \b
    Examples
      python -m workbench engines sglang --pack packed
      python -m workbench engines sglang --packed packed --out sglang.json
      python -m workbench engines sglang flashdsa --case eager+fp8
    """
    if pack_to is not None:
        _pack(pack_to, "SGLANG", as_json)
        return
    from workbench.engines import sglang_run

    path = _unpacked(packed, folder, "SGLANG")
    result = sglang_run.measure(
        plugins or sglang_run.PLUGINS,
        cases or tuple(sglang_run.CASES),
        folder,
        lambda words, gpu: sglang_run.in_a_process(words, gpu, path, _log(folder, words)),
        _tell,
        jobs,
    )
    _report(result, CALLS_OF_SGLANG, out, as_json)


def _pack(folder: Path, engine: str, as_json: bool) -> None:
    """Pack an engine, and say how large its archives are."""
    from workbench.engines import pack

    sizes = pack.pack(folder, getattr(pack, engine))
    if as_json:
        print_json(sizes)
    else:
        for name, size in sizes.items():
            click.echo(f"{folder / name}: {size / 2**20:.1f} MiB")


def _tell(row: dict[str, Any]) -> None:
    """Say what a run found."""
    click.echo(f"{row['case']}, {row['backend']}: {_equal(row)}", err=True)


def _report(
    result: dict[str, Any], calls: tuple[str, ...], out: Path | None, as_json: bool
) -> None:
    """Write and print the document; exit code 1 if a run failed or a token is wrong."""
    from workbench.engines import vllm_run

    if out is not None:
        with written(out) as draft:
            draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(result)
    else:
        _print(result, calls)
    wrong = vllm_run.findings(result)
    for line in wrong:
        click.echo(line, err=True)
    if wrong:
        raise SystemExit(1)


@engines.command()
@click.argument("backends", nargs=-1)
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="vLLM's: fp8_ds_mla.")
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True)
@FOLDER
@PACKED
@OUT
@json_option
def speed(
    backends: tuple[str, ...],
    kv_cache_dtype: str,
    rounds: int,
    folder: Path,
    packed: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time vLLM's steps of decoding and first tokens with several backends.

    The model has 16 layers of V3.2's attention and index (128 and 64 heads), and
    small dense parts. 1, 8 and 64 users decode after 8,192 and 65,536 tokens of
    random rows; one prompt of 4,096 and of 32,768 tokens waits for its token.
    BACKENDS are by default both of flashdsa, FLASHMLA_SPARSE and, with a bf16
    cache, FLASH_ATTN_MLA_SPARSE. Each runs in a process of its own; with an even
    number of rounds every second one has the opposite order.

    \b
    Examples
      python -m workbench engines speed --packed packed --out speed.json
      python -m workbench engines speed --kv-cache-dtype fp8_ds_mla
    """
    from workbench.engines import vllm_run

    path = _unpacked(packed, folder, "VLLM")
    result = vllm_run.measure_speed(
        backends or vllm_run.BACKENDS + vllm_run.BF16_ONLY * (kv_cache_dtype == "auto"),
        folder,
        lambda words, gpu: vllm_run.in_a_process(
            words, gpu, path, _log(folder, words), "workbench.engines.vllm_speed"
        ),
        lambda row: click.echo(f"{row['backend']}: round {row['round']}", err=True),
        rounds,
        kv_cache_dtype=kv_cache_dtype,
    )
    if out is not None:
        with written(out) as draft:
            draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(result)
        return
    columns = [("kind", "left"), ("users x tokens", "right"), ("backend", "left")]
    table = new_table([*columns, ("", "right")])
    for name, found in vllm_run.speeds(result["rows"]).items():
        kind, _, cell = name.partition(" ")
        unit = "tokens/s" if kind == "step" else "ms"
        for backend, value in found.items():
            table.add_row(kind, cell, backend, f"{value:,.0f} {unit}")
    print_table(new_console(), "Decoding, and the first token of a prompt", table)


def _unpacked(packed: Path | None, folder: Path, engine: str) -> str:
    """Unpack an engine; its folder, or "" for an installed one."""
    if packed is None:
        return ""
    from workbench.engines import pack

    target = folder / f"{engine.lower()}_unpacked"
    pack.unpack(packed, target, getattr(pack, engine))
    return str(target)


def _log(folder: Path, words: list[str]) -> Path:
    """The file that keeps a process's output: beside its answer, which is its third word."""
    return Path(words[2]).with_suffix(".log") if len(words) > 2 else folder / f"{words[0]}.log"


def _print(result: dict[str, Any], names: tuple[str, ...]) -> None:
    """A row a run."""
    table = new_table([(name, "left") for name in ("case", "backend", "equal", "calls")])
    for row in result["rows"]:
        calls = " ".join(str(row.get("calls", {}).get(name, 0)) for name in names)
        table.add_row(row["case"], row["backend"], _equal(row), calls)
    tokens = len(result["eager"]["tokens"][0])
    title = f"Tokens of {tokens} as eager's; bf16's error {result['eager']['error']:.3f}"
    print_table(new_console(), title, table)


def _equal(row: dict[str, Any]) -> str:
    """Equal tokens of each prompt, with the gap where there are others."""
    if "failure" in row:
        return "failed"
    return ", ".join(
        str(one["equal"]) + ("" if one["gap"] is None else f" ({one['gap']:.3f})")
        for one in row["prompts"]
    )
