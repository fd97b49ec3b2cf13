"""The demo's result as text: what was done, losses, captured mass, errors, examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashdsa.cli.console import new_console, new_table, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from flashdsa.demo import DemoResult


def print_report(result: DemoResult) -> None:
    """Print everything, in the order in which it happened."""
    console = new_console()
    _print_set_up(console, result)
    _print_served(console, result)
    _print_losses(console, result)
    _print_captured_mass(console, result)
    _print_differences(console, result)
    _print_errors(console, result)
    _print_examples(console, result)
    console.print(f"picture: {result.picture}", soft_wrap=True)


def _print_set_up(console: Console, result: DemoResult) -> None:
    options = result.options
    parts = ", ".join(f"{part} {seconds:.0f}" for part, seconds in result.seconds_by_part.items())
    table = new_table([("", "left"), ("", "wrap")])
    table.show_header = False
    for row in (
        (
            "text",
            f"{', '.join(result.text_sources)} ({result.train_bytes / 1e3:.0f} kB to train, "
            f"{result.held_out_bytes / 1e3:.0f} kB held out)",
        ),
        (
            "layer",
            f"{options.num_heads} heads, q and kv of 576 columns, V the first 512 of kv; "
            "indexer of 64 heads x 128",
        ),
        (
            "sparse",
            f"each query selects {options.topk} of {options.smallest_context} to "
            f"{options.window} keys",
        ),
        ("took", f"{result.seconds:.0f} s for {len(result.steps)} steps ({parts})"),
        ("trained by", f"{result.processes} process{'es' * (result.processes > 1)}"),
    ):
        table.add_row(*row)
    print_table(console, "DeepSeek Sparse Attention on real text", table)


def _print_served(console: Console, result: DemoResult) -> None:
    """The backend of each operation, in the order of a training step, and its kernels."""
    headings = [("operation", "left"), ("backend", "left"), ("kernels", "wrap")]
    table = new_table(headings)
    for row in result.served:
        table.add_row(row.operation, row.backend, ", ".join(row.kernels) or "-")
    table.add_row("indexer_kl_loss_dense", "torch", "-")
    print_table(console, f"Served by, on {result.device_name}", table)


def _print_losses(console: Console, result: DemoResult) -> None:
    headings = [("", "left"), ("sparse", "right"), ("dense, same weights", "right")]
    table = new_table(headings)
    for label, record in (("before training", result.before), ("after training", result.after)):
        table.add_row(label, f"{record.sparse_loss:.3f}", f"{record.dense_loss:.3f}")
    print_table(console, "Loss on held-out text, nats per byte", table)


def _print_captured_mass(console: Console, result: DemoResult) -> None:
    choices = ("indexer", "recent", "random", "best")
    titles = ("the indexer's", "the newest", "random", "best possible")
    table = new_table(
        [("", "left"), *((title, "right") for title in titles)],
    )
    for label, record in (
        ("before training", result.before),
        (f"after the warm-up (step {result.after_warm_up.step})", result.after_warm_up),
        ("after training", result.after),
    ):
        shares = [getattr(record.captured, choice) for choice in choices]
        table.add_row(label, *(f"{share:.1%}" for share in shares))
    print_table(
        console, f"Share of dense attention that {result.options.topk} selected keys hold", table
    )


def _print_differences(console: Console, result: DemoResult) -> None:
    headings = [("output", "left"), ("largest", "right"), ("relative", "right")]
    table = new_table(headings)
    for row in result.differences:
        table.add_row(row.output, f"{row.max_abs:.1e}", f"{row.relative:.1e}")
    print_table(console, "Difference of sparse from dense attention, trained weights", table)


def _print_errors(console: Console, result: DemoResult) -> None:
    headings = [("operation", "left"), ("output", "left"), ("dtype", "left")]
    headings += [("error", "right"), ("of its limit", "right"), ("", "right")]
    table = new_table(headings)
    for row in result.errors:
        table.add_row(
            row.operation,
            row.output,
            row.dtype,
            f"{row.relative_error:.1e}",
            f"{row.worst / row.limit:.1%}" if row.limit else "exact",
            "[green]ok[/]" if row.passed else "[bold red]FAILED[/]",
        )
    print_table(console, "Errors against float64, on the trained layer's tensors", table)
    console.print(
        "error: of the whole output, relative. of its limit: the worst row's or element's share of "
        "what the contract allows it.\n"
    )


def _print_examples(console: Console, result: DemoResult) -> None:
    """Held-out queries and the far key that each attended to most; text is printed escaped."""
    if not result.examples:
        return
    headings = [("the query reads", "wrap"), ("looks back at", "wrap"), ("followed by", "wrap")]
    headings += [("bytes back", "right"), ("weight", "right")]
    table = new_table(headings)
    for example in result.examples:
        texts = (example.query_text, example.key_text, example.followed_by)
        table.add_row(
            *(_quoted(text) for text in texts), str(example.distance), f"{example.attention:.0%}"
        )
    print_table(console, "Where queries look far back", table)


def _quoted(text: str) -> str:
    from rich.markup import escape

    return escape(repr(text))
