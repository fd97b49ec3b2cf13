"""The charts of README and docs, each drawn from kept results.

python -m workbench.charts transformers RESULT.json --out X.png
python -m workbench.charts context-parallel | draws RESULT.json ... --out X.png
python -m workbench.charts dense-to-sparse train.json look.json serve.json --out X.png
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from flashdsa.output_paths import written
from workbench import dense_to_sparse
from workbench.draws.report import CONDITIONS, Figures, by_operation
from workbench.draws.run import Document, machine_of, read_document, rows_of

INK, MUTED, FASTER, SLOWER, LOSS = "#1f2933", "#7b8794", "#1d5fa8", "#d55e00", "#fbe9e7"
HEADS = {16: "#4f8f5b", 64: "#1d5fa8", 128: "#e8890c"}
IMPLEMENTATIONS = {
    "flashdsa, indexer=fp8": "#1d5fa8",
    "flashdsa, indexer=exact": "#5b9bd5",
    "flashdsa, indexer=model": "#bcd4ee",
    "sdpa": "#d55e00",
    "eager": "#f2a65e",
}
PANELS = (
    ("prefill_tokens_per_s", "prefill, thousand tokens/s", 1e-3, "{:.0f}"),
    ("decode_ms_a_token", "a decoded token, ms", 1.0, "{:.1f}"),
    ("peak_GiB_above_weights", "memory beyond the weights, GiB", 1.0, "{:.1f}"),
)
"""Key of a row, title, factor, label of a bar."""


def draw_transformers(documents: list[Document], target: Path) -> None:
    """Three panels side by side, a group of bars a length; what ran out of memory says so."""
    (document,) = documents
    figure = Figure(figsize=(15, 4.8), dpi=100, facecolor="white")
    rows = document["rows"]
    lengths = sorted({row["length"] for row in rows})
    width = 0.86 / len(IMPLEMENTATIONS)
    names = list(IMPLEMENTATIONS)
    panels = figure.subplots(1, len(PANELS))
    for axes, (key, title, factor, words) in zip(panels, PANELS, strict=True):
        for row in rows:
            shift = width * (names.index(row["implementation"]) + 0.5) - 0.43
            place, there = lengths.index(row["length"]) + shift, key in row
            value = row[key] * factor if there else 0.0
            axes.bar(place, value, width * 0.92, color=IMPLEMENTATIONS[row["implementation"]])
            axes.annotate(
                words.format(value) if there else " out of memory", (place, value), (0, 2),
                textcoords="offset points", ha="center", va="bottom", fontsize=8,
                color=INK if there else MUTED, rotation=0 if there else 90,
            )  # fmt: skip
        axes.set_xticks(range(len(lengths)), [f"{length:,} tokens" for length in lengths])
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_title(title, loc="left", fontweight="bold", color=INK)
        axes.spines[["top", "right"]].set_visible(False)
    marks = [panels[0].bar(0, 0, color=colour) for colour in IMPLEMENTATIONS.values()]
    figure.legend(marks, names, loc="lower center", ncols=len(names), frameon=False)
    title = (
        "transformers' DeepSeek-V3.2, two layers with its head sizes, batch 1, bf16, on one "
        f"{document['device']} ({document['date'][:10]})"
    )
    figure.suptitle(title, x=0.01, ha="left", color=INK)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    _save(figure, target, 64)


def draw_context_parallel(documents: list[Document], target: Path) -> None:
    """Efficiency of each part of a layer's step over ranks, and of the step."""
    figure = Figure(figsize=(6, 3.4), dpi=100, layout="constrained", facecolor="white")
    axes = figure.subplots()
    documents = sorted(documents, key=lambda document: int(document["ranks"]))
    width, sizes = 0.8 / len(documents), documents[0]["sizes"]
    for number, (document, colour) in enumerate(zip(documents, HEADS.values(), strict=False)):
        found = efficiencies(document)
        places = [part + width * (number + 0.5) - 0.4 for part in range(len(found))]
        percent, name = [100 * x for x in found.values()], f"{document['ranks']} GPUs"
        bars = axes.bar(places, percent, width * 0.9, color=colour, label=name)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
        axes.set_xticks(range(len(found)), list(found))
    axes.set_ylim(0, 125)
    axes.axhline(100, color=MUTED, linewidth=1)
    axes.legend(fontsize=8, frameon=False, loc="upper right", ncols=len(documents))
    axes.spines[["top", "right"]].set_visible(False)
    of = f"{sizes['seq_len']:,} tokens, H={sizes['heads']}"
    title = f"One GPU's time over the ranks' together, %: {of}"
    axes.set_title(title, fontsize=9, loc="left", color=INK)
    _save(figure, target, 32)


def efficiencies(document: Document) -> dict[str, float]:
    """One GPU's time for all of the work over the ranks times theirs, part by part."""
    forward = document["attention"]["forward, correlated"]
    backward = document["attention"]["backward, correlated, grad_wire fp32"]
    indexer = document["indexer"]
    parts = {
        "indexer": (indexer["one GPU, all queries, ms"], max(indexer["zigzag"]["ms of each rank"])),
        "forward": (forward["one GPU, ms"], forward["ms"]),
        "backward": (sum(backward["kernel alone, ms"]), backward["ms"]),
    }
    alone, spread = (sum(times) for times in zip(*parts.values(), strict=True))
    parts["the step"] = (alone, spread)
    return {name: one / document["ranks"] / ours for name, (one, ours) in parts.items()}


def _spans(seeds: Sequence[int]) -> str:
    """Numbers in words: "1, 3 to 5"."""
    spans: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if spans and seed == spans[-1][-1] + 1:
            spans[-1].append(seed)
        else:
            spans.append([seed])
    ends = (dict.fromkeys([span[0], span[-1]]) for span in spans)
    return ", ".join(" to ".join(map(str, of_span)) for of_span in ends)


def draw_draws(documents: list[Document], target: Path) -> None:
    """Schema flashdsa-draws/1: a strip of dots an operation and condition, a dot a draw."""
    rows = [row for document in documents for row in rows_of(document)]
    strips = [
        (f"{operation}, {condition}", sorted(ratios))
        for operation, of_it in by_operation(rows).items()
        for condition in CONDITIONS
        if (ratios := [ratio for row in of_it if (ratio := row.ratio(condition)) is not None])
    ]
    height = 0.42 * len(strips)
    figure = Figure(figsize=(9, height + 1.3), dpi=100, layout="constrained", facecolor="white")
    axes = figure.subplots()
    jitter = random.Random(0)
    for place, (_, ratios) in enumerate(strips):
        figures = Figures.of(ratios)
        assert figures is not None
        places = [place + jitter.uniform(-0.28, 0.28) for _ in ratios]
        colours = [FASTER if ratio >= 1 else SLOWER for ratio in ratios]
        axes.scatter(ratios, places, s=7, c=colours, alpha=0.55, linewidths=0)
        axes.plot([figures.geometric_mean] * 2, [place - 0.36, place + 0.36], color=INK, lw=2)
        axes.plot([figures.p5] * 2, [place - 0.25, place + 0.25], color=MUTED, lw=1.5)
        words = f"{figures.lowest:.2f}  {figures.p5:.2f}  {figures.geometric_mean:.2f}"
        axes.text(
            1.01, place, words, transform=axes.get_yaxis_transform(), va="center", fontsize=9,
            color=INK,
        )  # fmt: skip
    lowest, highest = (f(ratio for _, ratios in strips for ratio in ratios) for f in (min, max))
    ticks = [
        tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 5, 10) if 0.8 * lowest < tick < 1.2 * highest
    ]
    axes.set(xscale="log", ylim=(len(strips) - 0.4, -0.6))
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(strips)), [name for name, _ in strips], fontsize=9)
    axes.axvline(1, color=INK, linewidth=1)
    axes.grid(axis="x", color=LOSS, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time of the fastest peer / ours, a dot a draw; right: lowest, 5 %, mean")
    seeds: dict[str, list[int]] = {}
    for document in documents:
        seeds.setdefault(machine_of(document), []).append(document["seed"])
    where = "; ".join(f"{machine}, seeds {_spans(some)}" for machine, some in seeds.items())
    axes.set_title(where, fontsize=10, loc="left", color=INK)
    _save(figure, target, 128)


def draw_dense_to_sparse(documents: list[Document], target: Path) -> None:
    """Four pictures of a run of the recipe: train.json, look.json, serve.json."""
    figure = Figure(figsize=(10, 7), dpi=90, layout="constrained", facecolor="white")
    dense_to_sparse.draw(dict(zip(dense_to_sparse.PARTS, documents, strict=True)), figure)
    _save(figure, target, 64)


def _save(figure: Figure, target: Path, colours: int) -> None:
    """Write it with few colours: a third of the bytes, and no difference to be seen."""
    with written(target) as draft:
        figure.savefig(draft)
        Image.open(draft).convert("RGB").quantize(colours).save(draft, optimize=True)


KINDS: dict[str, Callable[[list[Document], Path], None]] = {
    "transformers": draw_transformers,
    "context-parallel": draw_context_parallel,
    "draws": draw_draws,
    "dense-to-sparse": draw_dense_to_sparse,
}


def main() -> None:
    """Read and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    KINDS[chosen.kind]([read_document(path) for path in chosen.results], chosen.out)


if __name__ == "__main__":
    main()
