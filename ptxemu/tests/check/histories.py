"""A launch's history in words: what agents do, and what the check has found by then.

    launch warps=3; a st 800*4; bar a b; b ld 800+16; a st g1000; => error race; says 0x800

Warps are a, b, c...; `x = a store` starts an operation, which then acts as x. An address is one of
shared memory, or behind `g` of global, behind `l` of local memory, in hexadecimal; `,` parts
several, `*4` stands for four words, `+16` is the size and `@0` the owner. `t0-31:60+4` is 4 bytes
from byte 60 on of each of the lanes 0 to 31 of tensor memory. Of an mbarrier, `8/1` is phase 1 of
the one at 8. `=>` compares all findings so far.
"""

import re
from typing import Any

import numpy as np
from tests.check.fake_run import STORE, FakeOperation, FakeRun

from ptxemu.events import Access, AccessKind, Proxy, Space
from ptxemu.machine.state import Ordering

OPERATIONS = {
    "store": (STORE, ""),
    "load": ("cp.async.bulk.shared::cluster.global.mbarrier [buf], [in], 64, [bar]", ""),
    "copy": ("cp.async.cg.shared.global [buf], [in], 16", "cp.async"),
    "copied": ("cp.async.mbarrier.arrive.noinc.shared.b64 [bar]", "cp.async.mbarrier.arrive"),
    "wgmma": ("wgmma.mma_async [buf]", "wgmma"),
    "mma": ("tcgen05.mma.cta_group::1.kind::f16 [d], a, b, i, p", "tcgen05.mma"),
    "tload": ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {r}, [d]", "tcgen05.ld"),
    "tstore": ("tcgen05.st.sync.aligned.32x32b.x1.b32 [d], {r}", "tcgen05.st"),
    "tcopy": ("tcgen05.cp", ""),
    "tensor": ("cp.async.bulk.tensor", ""),
    "commit": ("tcgen05.commit", ""),
}
"""Instruction and kind, where it is not the opcode, by name."""
SPACES = {"": Space.SHARED, "g": Space.GLOBAL, "l": Space.LOCAL, "t": Space.TMEM}
KINDS = {"ld": "read", "atom": "atomic", "red": "atomic"}


def _place(text: str) -> tuple[Any, dict[str, Any]]:
    """Starts, and size, space and owner of an access."""
    space, where, size, owner = re.fullmatch(r"([glt]?)([^+@]*)\+?(\d*)@?(\d*)", text).groups()  # type: ignore[union-attr]
    if space == "t":
        lanes, _, byte = where.partition(":")
        first, _, last = lanes.partition("-")
        starts = [n * 2048 + int(byte or 0) for n in range(int(first), int(last or first) + 1)]
    else:
        starts = []
        for part in where.split(","):
            at, _, words = part.partition("*")
            starts += [int(at, 16) + 4 * word for word in range(int(words or 1))]
    own = int(owner) if owner else None
    return starts, {"size": int(size or 4), "space": SPACES[space], "owner": own}


def _phase(words: list[str]) -> dict[str, int]:
    """Offset and phase of an mbarrier."""
    offset, _, phase = (words[0] if words else "0").partition("/")
    return {"offset": int(offset, 16), "phase": int(phase or 0)}


class History:
    """Plays one history."""

    def __init__(self, text: str) -> None:
        steps = [step.strip() for step in text.split(";") if step.strip()]
        options = steps.pop(0).split()[1:] if steps[0].startswith("launch") else []
        sizes = {name: int(n) for name, _, n in (o.partition("=") for o in options) if n}
        self.run = FakeRun(**sizes, fixed_values="fixed" in options)
        self.operations: dict[str, FakeOperation] = {}
        self._uses = 0
        for step in steps:
            self._do(step)

    def _agent(self, name: str) -> Any:
        known = self.operations.get(name)
        return known or self.run.warps["abcd".index(name)]

    def _do(self, step: str) -> None:
        first, *rest = step.split()
        if first == "=>":
            expected = sorted(" ".join(rest).split(", ")) if rest != ["nothing"] else []
            found = sorted(f"{f.level} {f.code}" for f in self.run.findings)
            assert found == expected, f"{found}, and not {expected}"
        elif first == "says":
            text = step.removeprefix("says ")
            assert any(text in f.message for f in self.run.findings), f"nothing says: {text}"
        elif first == "counts":
            counts = [finding.count for finding in self.run.findings]
            assert counts == [int(n) for n in rest], f"{counts}, and not {rest}"
        elif first == "bar":
            self._uses += 1
            self.run.barrier(*(self._agent(name) for name in rest), use=self._uses)
        elif first == "cluster":
            self._uses += 1
            self.run.cluster_barrier(use=self._uses, relaxed=rest == ["relaxed"])
        elif first == "start":
            self.run.start_cluster(1)
        elif first == "exit":
            self.run.exit(self.run.ctas[int(rest[0])])
        elif first == "finish":
            self.run.finish()
        elif rest[0] == "=":
            self.operations[first] = self._issue(self._agent(rest[1]), rest[2], rest[3:])
        else:
            self._act(self._agent(first), rest[0], rest[1:])

    def _issue(self, warp: Any, name: str, rest: list[str]) -> FakeOperation:
        """`x = a mma after y z`, `x = a mma synced y`; a commit arrives, and is complete."""
        text, kind = OPERATIONS[name]
        how, others = (rest[0], [self._agent(one) for one in rest[1:]]) if rest else ("", [])
        operation = FakeOperation(
            self.run._agent_id(), kind or text.split()[0], warp, self.run.instruction(text)
        )
        if how == "synced":
            operation.ordering = Ordering(if_synced=others)
        elif how or name in ("mma", "commit"):
            operation.ordering = Ordering(others)
        self.run.checker.instruction_executed(warp, operation.instruction, 1)
        self.run.checker.async_issued(operation, warp)
        return operation

    def _act(self, agent: Any, verb: str, rest: list[str]) -> None:
        run, checker = self.run, self.run.checker
        if verb == "fence":
            run.fence(agent, rest[0])
        elif verb in ("join", "touch", "use"):
            reads = {"reads": True} if "reads" in rest else {}
            getattr(run, verb)(agent, self._agent(rest[0]), **reads)
        elif verb in ("arrive", "wait") and rest[-1:] == ["relaxed"]:
            token = ("mbarrier", 0, *_phase(rest[:-1]).values())
            (checker.released if verb == "arrive" else checker.acquired)(agent, token, "relaxed")
        elif verb in ("arrive", "wait", "see"):
            getattr(run, verb)(agent, **_phase(rest))
        elif verb == "missed":
            wait = run.instruction("mbarrier.try_wait.parity")
            checker.phases_missed(agent, 0, 0, 0, int(rest[0]), wait)
        elif verb == "executes":
            checker.instruction_executed(agent, run.instruction(rest[0]), 1)
        elif verb == "complain":
            checker.complained(rest[0], rest[1], "64 columns", agent, run.instruction("exit"))
        elif verb == "done":
            checker.async_completed(agent)
        elif verb == "commit":
            operation = self._issue(agent, "commit", ["after", *rest[1:]])
            run.arrive(operation, **_phase(rest))
            checker.async_completed(operation)
        elif verb == "tile":
            operation = self._issue(agent, "load", [])
            run.write(operation, 0x800, 64)
            run.arrive(operation, **_phase(rest))
            checker.async_completed(operation)
        elif verb == "map":
            (start,), _ = _place(rest[0])
            checker.accessed(
                Access(agent, Space.GLOBAL, None, np.array([start]), 128, AccessKind.READ,
                       Proxy.TENSORMAP, agent.instruction)
            )  # fmt: skip
        else:
            self._access(agent, verb, rest)

    def _access(self, agent: Any, verb: str, rest: list[str]) -> None:
        """`a st.release.gpu g2000`, `x ld 800+64`, `a mbarrier.init 400+8 silent`."""
        starts, how = _place(rest[0])
        opcode, *order = verb.split(".") if verb.split(".")[0] in ("st", *KINDS) else [verb]
        if order:
            how |= {"order": order[0], "scope": order[1]}
        text = f"{verb}.b32 of warp {agent.agent_id}"
        if isinstance(agent, FakeOperation):
            text = agent.instruction.text
        is_silent = rest[-1] == "silent"
        self.run.access(agent, text, KINDS.get(opcode, "write"), starts, **how, is_silent=is_silent)
