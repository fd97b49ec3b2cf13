"""What `python -m workbench model` shows, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from flashdsa.kernels.indexer.sm100.plan import PAGES_PER_STAGE
from workbench.model import backward_sm100, decode_sm90, forward_sm90, indexer_sm100
from workbench.model.backward_sm100 import BACKWARD_PLAN
from workbench.model.backward_sm100_budget import budget
from workbench.model.comparisons import Comparison, all_comparisons
from workbench.model.machine import B200, H200, MACHINES, GpuModel
from workbench.model.predict import CHIP, Prediction, predict
from workbench.model.shapes import QUERIES, TOPK
from workbench.model.traffic import Traffic
from workbench.model.unknowns import UNKNOWNS, Range, attention_ranges


@dataclass(frozen=True)
class Backward:
    """The Blackwell backward on a shape.

    Attributes:
        traffic: of a block of 32 keys and CTA. predictions: by the way dKV takes, ours first.
        fast_bulk: ours, were bulk reads not slower on shared memory than loads. slow_dsmem: ours,
            were the exchange half as fast, as both CTAs send at once.
    """

    queries: int
    topk: int
    s_kv: int
    traffic: Traffic
    predictions: tuple[Prediction, ...]
    fast_bulk: Prediction
    slow_dsmem: Prediction

    @property
    def ours(self) -> Prediction:
        """With the bulk reduction."""
        return self.predictions[0]

    def to_json_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "queries": self.queries,
            "topk": self.topk,
            "s_kv": self.s_kv,
            "a_block_and_cta": counts(self.traffic, B200),
            "predictions": [one.to_json_dict() for one in self.predictions],
            "with_bulk_reads_at_full_rate": self.fast_bulk.to_json_dict(),
            "with_dsmem_at_half_rate": self.slow_dsmem.to_json_dict(),
        }


def backward(
    queries: int = QUERIES,
    topk: int = TOPK,
    s_kv: int = backward_sm100.S_KV,
) -> Backward:
    """Predict our backward on B200 with each way of dKV."""

    def on(machine: GpuModel, reduction: backward_sm100.Reduction) -> Prediction:
        work = backward_sm100.work(
            machine, reduction=reduction, queries=queries, topk=topk, s_kv=s_kv
        )
        return predict(work, machine)

    return Backward(
        queries=queries,
        topk=topk,
        s_kv=s_kv,
        traffic=backward_sm100.traffic(BACKWARD_PLAN),
        predictions=tuple(on(B200, reduction) for reduction in backward_sm100.Reduction),
        fast_bulk=on(_with_fast_bulk_reads(B200), backward_sm100.Reduction.BULK),
        slow_dsmem=on(_with_slow_dsmem(B200), backward_sm100.Reduction.BULK),
    )


def _with_fast_bulk_reads(machine: GpuModel) -> GpuModel:
    return replace(machine, bulk_read_rate=machine.operand_rate, bulk_starved=machine.dsmem_starved)


def _with_slow_dsmem(machine: GpuModel) -> GpuModel:
    rate = machine.dsmem_rate
    return replace(machine, dsmem_rate=replace(rate, value=rate.value / 2))


def counts(traffic: Traffic, machine: GpuModel) -> dict[str, float]:
    """What a unit moves and computes."""
    return {
        "useful_flop": traffic.useful_flop,
        "tensor_core_cycles": traffic.tensor_cycles(machine),
        "operand_bytes": traffic.operand_bytes,
        "other_shared_memory_bytes": traffic.shared_bytes,
        "bulk_read_bytes": traffic.bulk_read_bytes,
        "dsmem_bytes": traffic.dsmem_bytes,
        "tensor_memory_bytes": traffic.tmem_bytes,
        "gathered_bytes": traffic.read_bytes,
        "reduced_bytes": traffic.reduce_bytes,
        "exponentials": traffic.exps,
        "warp_instructions": traffic.instructions,
    }


Rows = list[tuple[str, ...]]
Table = tuple[str, list[tuple[str, str]], Rows]
"""Title, columns as `cli.console.new_table` takes them, rows."""


def backward_tables(found: Backward) -> list[Table]:
    """Traffic, demands and predictions."""
    moved: Rows = [
        (name.replace("_", " "), f"{value:,.0f}")
        for name, value in counts(found.traffic, B200).items()
    ]
    ours = found.ours
    demands = sorted((ours.demands | {CHIP: ours.chip_cycles}).items(), key=lambda d: -d[1])
    per_clock = found.traffic.useful_flop * B200.sms.value * B200.clock.value / 1e12
    limits: Rows = [
        (name, f"{cycles:,.0f}", f"{per_clock / cycles:,.0f}") for name, cycles in demands if cycles
    ]
    rows: Rows = [
        (
            name,
            f"{one.cycles:,.0f}",
            f"{one.ends:,.0f}",
            f"{one.seconds * 1e3:.2f}",
            f"{one.tflops:.0f}",
            one.bound,
        )
        for name, one in [
            *((one.name.partition(", ")[2], one) for one in found.predictions),
            ("ours, were bulk reads as fast as loads", found.fast_bulk),
            ("ours, were DSMEM half as fast", found.slow_dsmem),
        ]
    ]
    number, text = "right", "left"
    title = f"mla_bwd, sm_100a: S={found.queries}, H=128, topk={found.topk}, S_kv={found.s_kv}"
    return [
        (
            f"{title}: a block of 32 keys in one CTA",
            [("what", text), ("count", number)],
            moved,
        ),
        (
            "Bounds on B200",
            [("resource", text), ("clk a block", number), ("TFLOPS at most", number)],
            limits,
        ),
        (
            "The same, old against new",
            [
                ("resource", "wrap"),
                ("first", number),
                ("now", number),
                ("from registers", number),
            ],
            [
                (
                    line.resource,
                    *(f"{one:,.0f}" for one in (line.first, line.now, line.from_registers)),
                )
                for line in budget(B200)
            ],
        ),
        (
            "Predicted on B200, by the way dKV takes: whole queries, one behind the other",
            [
                ("dKV", "wrap"),
                ("clk a block", number),
                ("between queries", number),
                ("ms", number),
                ("TFLOPS", number),
                ("bound", "wrap"),
            ],
            rows,
        ),
    ]


def range_tables(found: tuple[Range, ...]) -> list[Table]:
    """What the kernels take, and which constants decide."""
    number, text = "right", "left"
    times: Rows = [
        (
            f"{one.kernel.name}, topk {one.topk}",
            *(f"{at.tflops:,.0f}" for at in (one.best, one.middle, one.worst)),
            f"{one.best.seconds * 1e3:.2f} to {one.worst.seconds * 1e3:.2f}",
            one.middle.binds,
        )
        for one in found
    ]
    worth: Rows = [
        (
            name,
            f"{UNKNOWNS[name].good:g} to {UNKNOWNS[name].bad:g} {UNKNOWNS[name].unit}",
            one.kernel.name,
            f"{good:,.0f} to {bad:,.0f}",
            UNKNOWNS[name].probe or "nothing yet",
        )
        for one in found
        for name, good, bad in one.worth
    ]
    shape = f"S={found[0].queries}, H=128"
    return [
        (
            f"Attention on B200, sm_100a: {shape}, TFLOPS",
            [
                ("kernel", text),
                ("at best", number),
                ("middle", number),
                ("at worst", number),
                ("ms", text),
                ("binds", "wrap"),
            ],
            times,
        ),
        (
            "What nobody here has measured, by what it is worth while the others are in the middle",
            [
                ("constant", "wrap"),
                ("range", "wrap"),
                ("kernel", text),
                ("TFLOPS", text),
                ("in the first hour", "wrap"),
            ],
            worth,
        ),
    ]


def published(found: tuple[Range, ...]) -> list[str]:
    """A sentence for each kernel: what others' take."""
    return [
        f"* {one.kernel.name}: published of B200, TFLOPS: {one.kernel.published}" for one in found
    ]


def forward(case: forward_sm90.Prefill) -> Prediction:
    """Predict our forward on H200, back to back."""
    return forward_sm90.predict_forward(case, H200)


def decode_documents(topk: int) -> list[dict[str, Any]]:
    """The predictions of `decode_tables`, for --json."""
    return [
        decode_sm90.predict_decode(decode_sm90.Decode(*shape, packed, topk), H200).to_json_dict()
        for shape in decode_sm90.SHAPES
        for packed in (True, False)
        if not decode_sm90.Decode(*shape, packed, topk).few_heads
    ]


def decode_tables(topk: int) -> list[Table]:
    """Predicted times of our decode on H200, by heads, queries and kind of rows."""
    rows: Rows = []
    for heads, queries in decode_sm90.SHAPES:
        cases = [decode_sm90.Decode(heads, queries, packed, topk) for packed in (True, False)]
        found = [decode_sm90.predict_decode(case, H200) for case in cases]
        times = [f"{one.seconds * 1e6:.1f}" for one in found]
        bound = found[0].bound
        if cases[0].few_heads:
            times[0], bound = "", "the kernel of few heads, not predicted"
        rows.append((f"H={heads}, {queries}", f"{cases[1].num_ctas}", *times, bound))
    return [
        (
            f"mla_decode, sm_90a, on H200: topk {topk}, a cache far above L2; microseconds",
            [
                ("heads, queries", "left"),
                ("CTAs of a query", "right"),
                ("packed", "right"),
                ("bf16", "right"),
                ("packed is bound by", "wrap"),
            ],
            rows,
        )
    ]


def forward_tables(case: forward_sm90.Prefill) -> list[Table]:
    """What a step moves, the bounds, and the predicted time."""
    found = forward(case)
    moved: Rows = [
        (name.replace("_", " "), f"{value:,.0f}")
        for name, value in counts(forward_sm90.traffic(), H200).items()
        if value
    ]
    demands = sorted((found.demands | {CHIP: found.chip_cycles}).items(), key=lambda d: -d[1])
    ideal = forward_sm90.traffic().useful_flop * H200.sms.value * H200.busy_clock.value / 1e12
    limits: Rows = [
        (name, f"{cycles:,.0f}", f"{ideal / cycles:,.0f}") for name, cycles in demands if cycles
    ]
    milliseconds, tflops = found.seconds * 1e3, case.flop / found.seconds / 1e12
    number, text = "right", "left"
    return [
        (
            f"mla_fwd, sm_90a: {case.name}: a step of 128 keys",
            [("what", text), ("count", number)],
            moved,
        ),
        (
            "Bounds on H200, at the clock of busy tensor cores",
            [("resource", text), ("clk a step", number), ("TFLOPS at most", number)],
            limits,
        ),
        (
            "Predicted on H200, back to back",
            [("clk a step", number), ("ms", number), ("TFLOPS", number), ("bound", "wrap")],
            [(f"{found.cycles:,.0f}", f"{milliseconds:.2f}", f"{tflops:.0f}", found.bound)],
        ),
    ]


def indexer_tables() -> list[Table]:
    """The Blackwell indexer on B200, H=64, topk 2048: microseconds by pages per stage."""
    rows: Rows = []
    for name, found in indexer_sm100.predict_all(B200).items():
        by_pages = sorted(found, key=lambda one: one.pages_per_stage)
        times = (f"{one.low * 1e6:.1f} to {one.high * 1e6:.1f}" for one in by_pages)
        best = found[0]
        equal = (one for one in by_pages if one.high - best.high < indexer_sm100.RESOLUTION)
        choice = " or ".join(str(one.pages_per_stage) for one in equal)
        rows.append((name, f"{best.shape.ctas}", *times, choice, best.bound))
    columns = [("rows/tokens", "left"), ("CTAs of a row", "right")]
    columns += [(f"us, {pages} a stage", "right") for pages in PAGES_PER_STAGE]
    columns += [("best", "left"), ("binds", "wrap")]
    return [("indexer, sm_100a, on B200: H=64, topk=2048, predicted", columns, rows)]


def comparison_tables(found: list[Comparison]) -> list[Table]:
    """A table a group, and why what misses its aim does."""
    tables: list[Table] = []
    for group in dict.fromkeys(one.group for one in found):
        rows: Rows = [
            (
                one.name,
                one.unit,
                f"{one.predicted:,.1f}",
                f"{one.measured:,.1f}",
                f"{100 * one.error:+.1f}%" + ("" if one.within else " *"),
                one.bound,
            )
            for one in found
            if one.group == group
        ]
        columns = [
            ("kernel", "wrap"),
            ("unit", "left"),
            ("predicted", "right"),
            ("measured", "right"),
            ("error", "right"),
            ("bound", "wrap"),
        ]
        tables.append((group, columns, rows))
    return tables


def missed(found: list[Comparison]) -> list[str]:
    """A sentence for each comparison beyond its aim."""
    return [
        f"* {one.name}: {100 * one.error:+.1f}%, aim {100 * one.aim:.0f}%: {one.why}"
        for one in found
        if not one.within
    ]


def machine_tables() -> list[Table]:
    """Every constant with its source."""
    columns = [("constant", "left"), ("value", "right"), ("unit", "left")]
    tables: list[Table] = []
    for machine in MACHINES.values():
        rows: Rows = [
            (name, f"{c.value:g}", c.unit, c.basis.value, c.source)
            for name, c in machine.constants().items()
        ]
        tables.append((machine.name, [*columns, ("basis", "left"), ("source", "wrap")], rows))
    return tables


def document() -> dict[str, Any]:
    """Everything, for --json."""
    return {
        "backward": backward().to_json_dict(),
        "backward_budget": [asdict(line) for line in budget(B200)],
        "attention": [
            one.to_json_dict() for one in attention_ranges(QUERIES, TOPK, backward_sm100.S_KV)
        ],
        "indexer": [
            one.to_json_dict()
            for found in indexer_sm100.predict_all(B200).values()
            for one in found
        ],
        "comparisons": [one.to_json_dict() for one in all_comparisons()],
        "unknowns": {name: asdict(one) for name, one in UNKNOWNS.items()},
        "machines": {
            name: {key: asdict(c) for key, c in machine.constants().items()}
            for name, machine in MACHINES.items()
        },
    }
