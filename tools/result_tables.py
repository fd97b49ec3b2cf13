"""Writes tables into pages: results of the draws and of the dense-to-sparse guide's run, and which
packed rows Hopper takes.

    python tools/result_tables.py [--check]

The lines between `<!-- draws -->` and `<!-- /draws -->` are the figures of the draws in
`workbench/results/draws`, those of `<!-- first -->` times of four operations beside others', those
of `<!-- sizes -->` what `tools/first_figures.py` measured, those of `<!-- readme -->` README's
first screen, those of
`<!-- heads -->` their means by heads; those of `<!-- run -->` are the tables of the newest folder
of `workbench/results/dense_to_sparse`, those of `<!-- formats -->` what the implementations
declare, those of `<!-- triton -->` Triton's times over Hopper's own kernels' in
`workbench/results/triton`, those of `<!-- ways -->` the verdicts on the documents in
`workbench/results/ways`, those of `<!-- engines -->` vLLM's speeds in `workbench/results/engines`.
With --check nothing is written; exit code 1 if a table is old.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashdsa.bench.result import Row
    from workbench.draws.report import Report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the workbench is beside this folder
RESULTS = Path("workbench/results")
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    ROOT / "workbench" / "README.md",
    ROOT / "docs" / "decisions" / "0041-triton-is-a-backend.md",
    ROOT / "docs" / "guides" / "dense-to-sparse.md",
    ROOT / "docs" / "guides" / "hopper.md",
    ROOT / "docs" / "guides" / "serving.md",
    ROOT / RESULTS / "draws" / "NOTES.md",
    ROOT / RESULTS / "ways" / "NOTES.md",
)
HEADS = (128, 64, 32, 16, 8)
ATTENTION = ("backward", "decode", "forward")
"""Beginnings of the names of operations whose means by heads are told."""
OWN_TIMES = {
    "forward": ("sparse_mla_fwd/2026-11-21-bench-h200.json", "H=128, random"),
    "decode packed": ("sparse_mla_decode/2026-11-21-h200.json", "H=128, 64"),
    "indexer": ("indexer/2026-11-22-all-h200.json", "32/64K"),
}
"""Documents, and cases in them, of the first page's times."""
BACKWARD_TIMES = "sparse_mla_bwd/2026-11-21-h200-overlap.json"
MARKED = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def read_all_draws() -> dict[Path, list[Row]]:
    """Rows of draws by document."""
    from workbench.draws.run import read_draws

    paths = sorted((ROOT / RESULTS / "draws").glob("*.json*"))
    return {path: list(read_draws(path)) for path in paths}


def report_all(documents: dict[Path, list[Row]]) -> list[Report]:
    """Reports of all draws, in the order of their names."""
    from workbench.draws.report import reports

    found = reports(row for rows in documents.values() for row in rows)
    return sorted(found, key=lambda report: report.operation)


def sources(documents: dict[Path, list[Row]], folder: str) -> list[str]:
    """Places and dates of the documents of `folder`, as the page links it."""
    from workbench.draws.run import machine_of, read_document

    runs: dict[str, list[tuple[str, str]]] = {}
    for path in documents:
        document = read_document(path)
        commit = (document["git"] or {}).get("commit") or "unrecorded"
        runs.setdefault(machine_of(document), []).append((path.name[:10], commit[:10]))
    lines = []
    for machine, found in runs.items():
        dates, at = (", ".join(sorted(set(names))) for names in zip(*found, strict=True))
        lines.append(f"One {machine}, {dates}, commit {at}: [{len(found)} documents]({folder}).")
    return lines


def first_times() -> dict[str, tuple[str, str]]:
    """Return what is timed, and flashdsa's time with a warm L2, for each operation."""

    from flashdsa.bench.result import OURS

    def rows_of(name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((ROOT / RESULTS / name).read_text())["rows"]
        return found

    def microseconds(name: str, case: str) -> float:
        (row,) = [row for row in rows_of(name) if row["case"] == case]
        return float(row["ours_us"] if "ours_us" in row else row["times"]["hot"][OURS]["median"])

    forward, decode, indexer = (microseconds(*OWN_TIMES[name]) for name in OWN_TIMES)
    backward = [
        row["ours"]["hot"]
        for row in rows_of(BACKWARD_TIMES)
        if row["what"] == "time" and row["H"] == 128
    ]
    return {
        "forward": ("forward, 4,096 queries, 128 heads", f"{forward / 1e3:.1f} ms"),
        "backward": (
            "backward of the same, by how many keys queries share",
            f"{min(backward):.1f} to {max(backward):.1f} ms",
        ),
        "decode packed": ("decode of 64 queries, packed cache", f"{decode:.0f} µs"),
        "indexer": ("indexer over 32 x 64K tokens", f"{indexer:.0f} µs"),
    }


def first_table() -> str:
    """Times of four operations, and those of the fastest other library; "" without any."""
    documents = read_all_draws()
    if not documents:
        return ""
    found = {one.operation: one for one in report_all(documents)}
    lines = [
        "| one H200 | flashdsa takes | the fastest other library takes, over random shapes |",
        "| --- | --: | --- |",
    ]
    for name, (what, own) in first_times().items():
        warm, cold = (found[name].figures[condition] for condition in ("hot", "cold"))
        ratios = (
            f"{warm.geometric_mean:.2f} times as long (mean of {warm.count} shapes); "
            f"at worst {warm.lowest:.2f}, with a cold L2 {cold.lowest:.2f}"
        )
        lines.append(f"| {what} | {own} | {ratios} |")
    dates = sorted({path.name[:10] for path in documents})
    own_dates = sorted(
        {Path(name).name[:10] for name, _ in OWN_TIMES.values()} | {Path(BACKWARD_TIMES).name[:10]}
    )
    lines += [
        "",
        "Below 1 the other library is faster than flashdsa. [All operations, also those where we "
        "lose more](workbench/README.md#how-fast).",
        f"Means and times with a warm L2; times {own_dates[0]} to {own_dates[-1]}, [random "
        f"shapes](workbench/DRAWS.md) {dates[0]} to {dates[-1]}.",
    ]
    return "\n".join([*lines, ""])


def sizes_text() -> str:
    """Say what the first commands cost, as `tools/first_figures.py` measured them."""
    from tools.first_figures import read_record

    found = read_record()

    def size(name: str) -> str:
        one = found[name]
        downloaded = (one.downloaded_bytes or 0) / 1e9
        return f"{downloaded:.1f} GB to download, {one.installed_bytes / 1e9:.1f} on disk"

    def time(name: str) -> str:
        one = found[name]
        minutes, seconds = divmod(round(one.wall_seconds), 60)
        wall = f" ({minutes}:{seconds:02} min on {one.cores} idle cores)" if one.is_quiet else ""
        return f"{one.cpu_seconds:.0f} s of CPU time{wall}"

    dates = sorted({one.date for one in found.values()})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"""\
`make` needs Linux, gcc and Python 3.11 to 3.14. Its first run makes `.venv`: {size("make")},
{time("make")} (with CUDA: {size("make cuda")}). \
`make demo` takes {time("demo")},
`make test` {time("test")}. \
An environment of yours with PyTorch's CPU build: {size("pip")};
`pip install '.[cuda]'`: {size("pip cuda")}. Measured {when} by `python -m tools.first_figures`.
"""


def readme_for_the_site() -> str:
    """README's first screen for docs/index.md; links to what the site lacks become names."""
    text = (ROOT / "README.md").read_text().partition("## In Python")[0]
    text = re.sub(r"<!-- /?\w+ -->\n", "", text).replace("](docs/", "](")
    return re.sub(r"\[([^]]+)\]\(((?:workbench/)?[A-Z]+\.md)[^)]*\)", r"\1 (`\2`)", text)


def draws_table() -> str:
    """Figures of the draws in Markdown, hot / cold, and where they were drawn; "" without any."""
    documents = read_all_draws()
    if not documents:
        return ""
    from workbench.draws.report import markdown

    lines = sources(documents, "results/draws")  # from the workbench's page
    return "\n".join([markdown(report_all(documents)), "", *lines, ""])


def means_by_heads(documents: dict[Path, list[Row]]) -> dict[tuple[str, int], list[str]]:
    """Geometric means, hot and cold, of attention's operations by heads."""
    from workbench.draws.report import CONDITIONS, Figures

    ratios: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in (row for rows in documents.values() for row in rows):
        for condition in CONDITIONS:
            ratio = row.ratio(condition)
            if ratio is not None and row.operation.startswith(ATTENTION):
                of_heads = ratios.setdefault((row.operation, row.problem["h"]), {})
                of_heads.setdefault(condition, []).append(ratio)
    return {
        key: [f"{found.geometric_mean:.2f}" for one in by.values() if (found := Figures.of(one))]
        for key, by in ratios.items()
    }


def heads_table() -> str:
    """Geometric means by heads in Markdown, hot / cold."""
    means = means_by_heads(read_all_draws())
    lines = [f"| heads | {' | '.join(map(str, HEADS))} |", f"|{'---|' * (1 + len(HEADS))}"]
    for name in sorted({name for name, _ in means}):
        cells = (" / ".join(means.get((name, heads), "-")) for heads in HEADS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def formats_table() -> str:
    """Which rows of kv Hopper's forward takes, in Markdown."""
    from flashdsa.backends.catalog import registry
    from flashdsa.row_formats import ROW_FORMATS

    served = [
        one.features for one in registry.implementations("sparse_mla_fwd") if one.backend == "sm90"
    ]
    lines = [
        "| rows | bytes | one list of ids | range, blocks, second source of the same rows | "
        "second source of other rows |",
        "|---|---|---|---|---|",
        "| bf16 | 1152, 1024 | yes | yes | no |",
    ]
    for name, form in ROW_FORMATS.items():
        taken = [one for one in served if form in one.row_formats]
        lists = any(one.extra_kv and one.ranges for one in taken)
        mixed = (one.mixed_formats for one in taken if form in one.mixed_formats)
        beside = {
            other for one in mixed for other in one.names if ROW_FORMATS[other].split == form.split
        } - {name}
        cells = ["yes" if taken else "no", "yes" if lists else "no"]
        cells.append(", ".join(f"`{other}`" for other in sorted(beside)) or "no")
        lines.append(f"| `{name}` | {form.row_bytes} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def run_tables() -> str:
    """Tables of the newest run of `examples/dense_to_sparse` in Markdown."""
    from workbench.dense_to_sparse import read_run, tables

    return f"{tables(read_run(max((ROOT / RESULTS / 'dense_to_sparse').iterdir())))}\n"


def ways_tables() -> str:
    """Verdicts on each operation's ways in Markdown."""
    from workbench.draws.run import machine_of, read_document
    from workbench.ways.judge import judge, lines_of, regret

    lines = []
    for path in sorted((ROOT / RESULTS / "ways").glob("*.json*")):
        document = read_document(path)
        rows, commit = document["draws"], document["git"]["commit"][:10]
        hot, cold = regret(rows)
        lines += [
            f"`{document['operation']}`: {len(rows)} draws of seed {document['seed']}, one "
            f"{machine_of(document)}, {path.name[:10]}, commit {commit}. The choice takes "
            f"{hot:.3f} hot and {cold:.3f} cold of the time of each draw's fastest way.",
            "",
            "| way | serves | lost hot; cold | worst | below 0.9 | lines | stays |",
            "| --- | --: | --: | --: | --: | --: | --- |",
        ]
        for one in judge(rows):
            own = lines_of(one.kind)
            lost = "; ".join(f"{each:.1f} %" for each in one.lost)
            lines.append(
                f"| {one.kind} | {one.taken:.0f} % | {lost} | {one.worst:.2f} | {one.below} | "
                f"{own or '-'} | {'yes' if one.stays(own) else '**no**'} |"
            )
        lines.append("")
    return "\n".join(lines)


def triton_table() -> str:
    """Triton's times over those of Hopper's own kernels by operation, hot, in Markdown."""
    from flashdsa.bench.result import OURS
    from workbench.draws.peers import OTHERS
    from workbench.draws.report import Figures
    from workbench.draws.run import read_draws

    ratios: dict[str, list[float]] = {}
    for path in sorted((ROOT / RESULTS / "triton").glob("*seed*.json*")):
        for row in read_draws(path):
            times = row.times["hot"]
            found = ratios.setdefault(row.operation, [])
            found.append(times[OTHERS["triton"]].median / times[OURS].median)
    lines = ["| operation | draws | mean | median | highest |", "|---|---|---|---|---|"]
    for name, values in sorted(ratios.items()):
        of = Figures.of(values)
        if of is not None:
            cells = f"{of.geometric_mean:.2f} | {of.median:.2f} | {max(values):.2f}"
            lines.append(f"| {name} | {len(values)} | {cells} |")
    return "\n".join([*lines, ""])


def engines_table() -> str:
    """Speeds of vLLM's backends in Markdown, ours first."""
    from workbench.draws.run import machine_of, read_document
    from workbench.engines.vllm_run import busy_times, speeds

    lines = []
    for path in sorted((ROOT / RESULTS / "engines").glob("*speed*.json")):
        document = read_document(path)
        rows = document["rows"]
        found = speeds(rows)
        names = list(next(iter(found.values())))
        ours = next(name for name in names if name.endswith("INDEXER"))
        others = [name for name in names if not name.startswith("FLASHDSA")]
        cache = rows[0]["cache"]
        shown = [ours, *(name for name in names if name != ours)]
        lines += [
            f"{'bf16' if cache == 'auto' else cache} cache, {machine_of(document)}, "
            f"vLLM {rows[0]['vllm']}, {path.name[:10]}:",
            "",
            "| users after context | "
            + " | ".join(f"`{name}`" for name in shown)
            + " | ours over the best other | GPU time, best other's over ours |",
            "| --- |" + " --: |" * (len(shown) + 2),
        ]
        busy = busy_times(rows)
        for cell, values in found.items():
            kind, users, _, tokens = cell.split()
            is_step = kind == "step"
            best = (max if is_step else min)(values[name] for name in others)
            ratio = values[ours] / best if is_step else best / values[ours]
            said = f"{users} after {int(tokens):,}" if is_step else f"prompt of {int(tokens):,}"
            unit = "tokens/s" if is_step else "ms"
            cells = " | ".join(f"{values[name]:,.0f} {unit}" for name in shown)
            of_gpu = busy.get(f"{users} x {tokens}", {})
            least = min((of_gpu[name] for name in others if name in of_gpu), default=None)
            gpu = "-" if least is None else f"{least / of_gpu[ours]:.2f}"
            lines.append(f"| {said} | {cells} | {ratio:.2f} | {gpu} |")
        lines.append("")
    return "\n".join(lines)


TABLES = {
    "triton": triton_table,
    "engines": engines_table,
    "ways": ways_tables,
    "draws": draws_table,
    "heads": heads_table,
    "first": first_table,
    "sizes": sizes_text,
    "readme": readme_for_the_site,
    "run": run_tables,
    "formats": formats_table,
}


def updated(text: str) -> str:
    """A page with its tables as the results have them now."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def main() -> int:
    """Update the pages, or say which is old."""
    writes, is_old = "--check" not in sys.argv[1:], False
    for page in PAGES:  # README first, which another page repeats
        text = page.read_text()
        if (current := updated(text)) == text:
            continue
        if writes:
            page.write_text(current)
        else:
            is_old = True
            print(f"{page}: not what the results say; run tools/result_tables.py")
    return int(is_old)


if __name__ == "__main__":
    sys.exit(main())
