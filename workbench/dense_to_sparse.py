"""Tables and pictures of a run of `examples/dense_to_sparse`: train.json, look.json, serve.json.

python -m workbench.dense_to_sparse FOLDER X.png    # draws the pictures
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.draws.chart import save
from workbench.draws.run import Document, read_document

STAGES = {
    "dense": "#7b8794", "warm_up": "#e8890c", "sparse": "#1d5fa8", "dense_control": "#4f8f5b",
}  # fmt: skip
PARTS = ("train", "look", "serve")
TAUGHT = {"dense": "untaught", "warm_up": "after the warm-up", "sparse": "after the sparse stage"}
RECALL = 0.9  # `examples.dense_to_sparse.looks`
SMOOTHED_STEPS = 20
SHOWN_USERS = (1, 16, 64)
"""The table of decoding has these; the document has others, too."""


def read_run(folder: Path) -> Document:
    """The three parts' results by their names, from documents that may be compressed."""
    return {part: read_document(next(folder.glob(f"{part}.json*"))) for part in PARTS}


def tables(run: Document) -> str:
    """All tables in Markdown."""
    made = (
        _quality(run["look"]),
        _recalls(run["look"]),
        _lists(run["look"]),
        _training(run["look"]),
        _decoding(run["serve"]),
    )
    return "\n\n".join(made)


def _quality(look: Document) -> str:
    rows = [
        [stage, form, f"{x['loss']:.4f}"]
        for stage, found in look["stages"].items()
        for form, x in found.items()
        if form != "selection"
    ]
    return _table(["stage", "attention", "held-out nats a byte"], rows)


def _of_best(look: Document, stage: str, keys: str) -> list[float]:
    """Share, by layer, of the best keys' probability that others have."""
    found = look["stages"][stage]["selection"]
    return [x / best for x, best in zip(found[keys], found["best"], strict=True)]


def _recalls(look: Document) -> str:
    rows = [
        [label, *(f"{min(_of_best(look, stage, keys)):.1%}" for keys in ("captured", "newest"))]
        for stage, label in TAUGHT.items()
    ]
    return _table(["indexer", "recall in the worst layer", "of the newest keys"], rows)


def _lists(look: Document) -> str:
    """Lowest and highest layer of each share; `draw` has every layer."""
    found = look["stages"]["sparse"]["selection"]
    columns = {
        "on selected": found["captured"],
        "on newest": found["newest"],
        "on best": found["best"],
        "next query's": found["next"],
    }
    rows = [
        [word, *(f"{of(layers):.1%}" for layers in columns.values())]
        for word, of in (("lowest", min), ("highest", max))
    ]
    unions = list(zip(*found["unions"], strict=True))
    for row, of in zip(rows, (min, max), strict=True):
        row.append(", ".join(f"{of(layers):.2f}" for layers in unions))
    return _table([f"of {len(found['best'])} layers", *columns, "union of 2, 4, 8"], rows)


def _training(look: Document) -> str:
    head = ["tokens", "dense, tokens/s", "sparse, tokens/s", "dense, GiB", "sparse, GiB"]
    forms = ("dense", "sparse")
    rows = [
        [
            f"{int(n):,}",
            *(f"{x[form]['tokens_s']:,.0f}" for form in forms),
            *(f"{x[form]['peak_gib']:.1f}" for form in forms),
        ]
        for n, x in look["speed"].items()
    ]
    return _table(head, rows)


def _decoding(serve: Document) -> str:
    forms = ("sparse", "dense", "expanded")
    rows = [
        [f"{row['context']:,}", str(row["users"]), *(_ms(row[f"{form}_ms"]) for form in forms)]
        for row in serve["rows"]
        if row["users"] in SHOWN_USERS
    ]
    return _table(["context", "users", *(f"{form}, ms" for form in forms)], rows)


def _ms(value: float | None) -> str:
    return "no room" if value is None else f"{value:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def headline(run: Document) -> str:
    """Say in one sentence what the run showed."""
    stage, (length, speed) = run["look"]["stages"]["sparse"], [*run["look"]["speed"].items()][-1]
    recall = min(_of_best(run["look"], "sparse", "captured"))
    faster = speed["sparse"]["tokens_s"] / speed["dense"]["tokens_s"]
    return (
        f"Selected keys hold {recall:.1%} or more of what the best hold; held-out loss "
        f"{stage['sparse']['loss']:.3f} over them, {stage['dense']['loss']:.3f} over all.\n"
        f"Training over {int(length):,} tokens is {faster:.1f} times as fast."
    )


def draw(run: Document, target: Path) -> None:
    """Losses over steps, recall and what lists hold by layer, speed over length."""
    figure = Figure(figsize=(10, 7.6), dpi=90, layout="constrained", facecolor="white")
    figure.suptitle(headline(run), x=0.01, ha="left", fontsize=12, fontweight="bold")
    for axes, panel in zip(
        figure.subplots(2, 2).flat, (_losses, _recall, _selection, _speed), strict=True
    ):
        panel(run, axes)
        for line in axes.legend(fontsize=9, frameon=False).get_lines():
            line.set_linewidth(3)  # or grey and green look alike
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, target, 64)


def _losses(run: Document, axes: Axes) -> None:
    after = {"dense": 0}
    after["warm_up"] = after["dense_control"] = len(run["train"]["dense"]["losses"])
    after["sparse"] = after["warm_up"] + len(run["train"]["warm_up"]["losses"])
    for stage in ("dense", "sparse", "dense_control"):
        losses = [language for language, _ in run["train"][stage]["losses"]]
        width = min(SMOOTHED_STEPS, len(losses))
        smooth = [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]
        steps = range(after[stage] + width, after[stage] + len(losses) + 1)
        axes.plot(steps, smooth, color=STAGES[stage], label=stage.replace("_", " "), lw=1.5)
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.set_title("training loss", fontsize=10, loc="left")


def _recall(run: Document, axes: Axes) -> None:
    for stage, label in TAUGHT.items():
        missed = [1 - share for share in _of_best(run["look"], stage, "captured")]
        axes.plot([100 * x for x in missed], "o-", ms=3, color=STAGES[stage], label=label)
    axes.axhline(100 * (1 - RECALL), color="#d55e00", lw=1, ls="--", label="to pass: below")
    axes.set(xlabel="layer", ylabel="%, log scale", yscale="log", ylim=(0.01, 120))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("what the indexer misses of the best keys' share", fontsize=10, loc="left")


def _selection(run: Document, axes: Axes) -> None:
    for stage, style in (("warm_up", ":"), ("sparse", "-")):
        found = run["look"]["stages"][stage]["selection"]
        for key, colour, words in (
            ("best", "#7b8794", "on the best"),
            ("captured", "#1d5fa8", "on the selected"),
            ("newest", "#e8890c", "on the newest"),
            ("next", "#4f8f5b", "rows that the next query has, too"),
        ):
            label = words if stage == "sparse" else None
            axes.plot(
                [100 * x for x in found[key]], style, marker="o", ms=3, color=colour, label=label
            )
    lowest = 10 * (min(axes.dataLim.intervaly) // 10) - 10  # room for the legend
    axes.set(xlabel="layer", ylabel=f"%, from {lowest:.0f}", ylim=(lowest, 101))
    axes.set_title("probability on keys; dotted: after the warm-up", fontsize=10, loc="left")


def _speed(run: Document, axes: Axes) -> None:
    speed = run["look"]["speed"]
    for form, stage in (("dense", "dense"), ("sparse", "sparse")):
        points = [(int(n), x[form]["tokens_s"] / 1e3) for n, x in speed.items()]
        axes.plot(*zip(*points, strict=True), "o-", color=STAGES[stage], label=form)
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(n) for n in speed], [f"{int(n):,}" for n in speed])
    axes.set(xlabel="tokens of a sequence", ylabel="thousand tokens/s", ylim=(0, None))
    axes.set_title("training, forward and backward", fontsize=10, loc="left")


if __name__ == "__main__":
    draw(read_run(Path(sys.argv[1])), Path(sys.argv[2]))
