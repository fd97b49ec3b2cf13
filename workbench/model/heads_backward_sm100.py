"""Our Blackwell backward with split heads: a unit is a block of 32 keys in one CTA of the pair.

Loads of the peer's shared memory are taken at the rate of st.async, the better one. A CTA owns
every other block. The other CTA waits for it at each part, so both take the owner's time.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashdsa.kernels.attention.sm100.bwd.heads.plan import HEADS, HeadsPlan
from flashdsa.kernels.attention.sm100.bwd.heads.products import products_of
from flashdsa.kernels.attention.sm100.core.tile import BF16, CLUSTER, FP32
from flashdsa.kernels.catalog import MLA_BWD_HEADS
from workbench.model import roofline
from workbench.model.backward_sm100 import DIMS, SASS_PER_PTX
from workbench.model.machine import GpuModel
from workbench.model.roofline import Footprint, Matmul, Traffic, Work, matmul_of, mma_step
from workbench.model.timeline import BULK, DSMEM, After, Step, transfer

PLAN: HeadsPlan = MLA_BWD_HEADS.plans[0]
"""The plan of the kernel."""
INSTRUCTIONS = {"softmax": 1772, "load": 405, "reduce": 1630, "mma": 631}
"""PTX instructions of a block and CTA, all warps of the role."""
KEYS_BYTES = PLAN.own_keys * roofline.ROW_BYTES
"""Keys of a block that a CTA gathers, and as many that it reads from its peer."""
DKV_BYTES = PLAN.tile.keys * roofline.GRADIENT_ROW_BYTES
"""dKV of a block: of either CTA, and of the sum."""
SCORE_BYTES = HEADS * PLAN.tile.keys * BF16
"""S or dS."""
LANE_GROUPS = 4
"""Times that S^T and dS^T lie in tensor memory."""


def matmuls() -> dict[str, tuple[Matmul, ...]]:
    """List those of a block by the steps that issue them."""
    of = products_of(PLAN)
    (s0, ds0), *others = of.dkv
    found = {"P": (of.p,), "dP": (of.dp,), "dKV0 S": (s0,), "dKV0 dS": (ds0,), "dQ": of.dq}
    found |= {f"dKV{part}": products for part, products in enumerate(others, 1)}
    return {name: tuple(map(matmul_of, products)) for name, products in found.items()}


def traffic() -> Traffic:
    """Count one block and CTA, which owns half a block."""
    read_at_peer = KEYS_BYTES + DKV_BYTES / CLUSTER
    # S and dS stored, and read by four lane groups; dS once more, and read by two
    staged = 2 * (1 + LANE_GROUPS) * SCORE_BYTES + 3 * SCORE_BYTES
    scores = 2 * HEADS * PLAN.tile.keys * FP32
    return Traffic(
        useful_flop=2.0 * HEADS * PLAN.tile.keys * DIMS,
        matmuls=tuple(one for several in matmuls().values() for one in several),
        # gathered, read by the peer, stored again; sdkv
        shared_bytes=2 * KEYS_BYTES + staged + DKV_BYTES + read_at_peer,
        dsmem_bytes=read_at_peer,
        tmem_bytes=scores + DKV_BYTES + (2 * LANE_GROUPS + 2) * SCORE_BYTES,
        read_bytes=KEYS_BYTES,
        reduce_bytes=DKV_BYTES / CLUSTER,
        exps=HEADS * PLAN.tile.keys,
        instructions=sum(INSTRUCTIONS.values()) * SASS_PER_PTX,
    )


def steps(machine: GpuModel) -> Iterator[Step]:
    """Order the roles' steps as mma.py, load.py, softmax.py and reduce_dkv.py do."""
    of, bar = matmuls(), machine["barrier_latency"]
    heard = machine["dsmem_latency"] + bar
    landed = machine["l2_latency"] + bar

    def mma(name: str, *after: After) -> Step:
        return mma_step(machine, name, of[name], *after)

    yield mma("P", ("refill", 0), ("S ready", 1))
    yield mma("dP", ("dS ready", 1))
    yield mma("dKV0 S", ("S ready", 0), ("part 2 sent", 1))
    yield mma("dKV0 dS", ("dS ready", 0))
    yield mma("dQ")
    yield mma("dKV1", ("part 0 sent", 0))
    yield mma("dKV2", ("part 1 sent", 0))

    gather = roofline.l2_cycles(machine, KEYS_BYTES)
    yield Step("load", "gather", gather, "gather", 0, (("dQ", 1), ("keys read", 1)), landed)
    yield Step("load", "peer told", 0, latency=heard)
    keys = KEYS_BYTES / machine["dsmem_rate"]
    yield from transfer("load", "keys read", keys, DSMEM, latency=heard)
    store = KEYS_BYTES / machine["operand_rate"]
    yield Step("load", "refill", store, "", 0, (("keys read", 0),), bar)

    issue = INSTRUCTIONS["softmax"] * SASS_PER_PTX / 4
    exps = traffic().exps / machine["exp_rate"]
    for name, product, least, after in (
        ("S ready", "P", exps, (("dKV2", 1),)),
        ("dS ready", "dP", 0.0, ()),
    ):
        cycles = max(0.5 * issue, least)
        yield Step("softmax", name, cycles, "", 0, ((product, 0), *after), bar)

    issue = INSTRUCTIONS["reduce"] * SASS_PER_PTX / 4
    for part, (mmas, dims) in enumerate(
        (("dKV0 dS", PLAN.part_dims), ("dKV1", PLAN.part_dims), ("dKV2", PLAN.tile.rope_dims))
    ):
        share = dims / PLAN.tile.d_qk
        size, staged = share * DKV_BYTES, f"part {part} staged"
        # the peer's part comes as the own one does, and is heard of a message later
        yield Step("reduce", staged, share * issue, "", 0, ((mmas, 0),), heard)
        yield from transfer("reduce", f"part {part} read", size / machine["dsmem_rate"], DSMEM)
        sent = size / machine["bulk_read_rate"]
        merged = f"part {part} read", 0
        yield from transfer("reduce", f"part {part} sent", sent, BULK, merged, latency=landed)


def work(machine: GpuModel, queries: int, topk: int, s_kv: int) -> Work:
    """Take the kernel on a shape of 128 heads: a pair has one query, so its ends are a launch's."""
    blocks = -(-topk // PLAN.tile.keys)
    footprint = Footprint(s_kv * roofline.GRADIENT_ROW_BYTES, s_kv * roofline.ROW_BYTES)
    units = float(queries * blocks * CLUSTER)
    return Work(traffic(), units, footprint, tuple(steps(machine)))
