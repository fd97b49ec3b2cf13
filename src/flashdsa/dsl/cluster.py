"""Messages between the CTAs of a cluster, and how a CTA enters and leaves one."""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl import ptx
from flashdsa.dsl.memory import Memory, initialise_barriers


def peer_address(address: Any, peer: Any) -> Any:
    """The shared::cluster address that corresponds to `address` in another CTA of the cluster.

    Args:
        address: of this CTA's shared memory: a pointer, or an Int32. peer: the CTA's rank.
    """
    if isinstance(address, cute.Pointer):
        return cute.arch.map_dsmem_ptr(address, peer)
    return ptx.word("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", Int32(address), Int32(peer))


def store_async(address: Any, words: Sequence[Any], barrier: Any) -> None:
    """Store 1, 2 or 4 words in another CTA, whose barrier counts their bytes.

    PTX ISA, "st.async": the completion has release semantics at cluster scope, so whoever waits for
    the barrier sees the words; neither a fence nor a barrier of the cluster is needed.

    Args:
        address, barrier: shared::cluster, of the same CTA; see `peer_address`. The address is a
            multiple of the bytes that are stored.
    """
    count = len(words)
    vector, operand = "", "{$r1}"
    if count > 1:
        vector = f".v{count}"
        operand = "{" + ", ".join(f"{{$r{i + 1}}}" for i in range(count)) + "}"
    ptx.run(
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 "
        f"[{{$r0}}], {operand}, [{{$r{count + 1}}}];",
        address,
        *(Int32(word) for word in words),
        barrier,
    )


def copy_to_peer(address: Any, source: Any, count: Any, barrier: Any) -> None:
    """One thread: copy neighbouring bytes of this CTA's shared memory to another CTA's, whose
    barrier counts them. The source may change, and this CTA may end, only after that barrier's
    phase.

    Args:
        address, barrier: shared::cluster, of the same CTA; see `peer_address`. source: an Int32.
        count: of bytes; it and the addresses are multiples of 16.
    """
    ptx.run(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        address,
        Int32(source),
        Int32(count),
        barrier,
    )


def send(address: Any, words: Sequence[Any], barrier: Any, peer: Any) -> None:
    """Call `store_async` for the same offset in another CTA; pointers to this CTA's shared
    memory."""
    store_async(peer_address(address, peer), words, peer_address(barrier, peer))


@cute.jit
def enter_cluster(memory: Memory, thread: Int32, warps: cutlass.Constexpr = 1) -> None:
    """All threads of a CTA: initialise its barriers, and tell the other CTAs that they are ready.

    The other CTAs need not be ready yet: `cute.arch.cluster_wait` comes before the first message to
    them.
    """
    initialise_barriers(memory, thread, warps)
    cute.arch.sync_threads()
    cute.arch.cluster_arrive_relaxed()


def leave_cluster(relaxed: bool = False) -> None:
    """All threads: wait until all CTAs have called, so that messages find their memory.

    Args:
        relaxed: what the threads wrote is not released: nobody reads it afterwards.
    """
    if relaxed:
        cute.arch.cluster_arrive_relaxed()
    else:
        cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def store_to_peer(address: Any, word: Int32) -> None:
    """Store a word to another CTA's shared memory; `address`: see `peer_address`."""
    ptx.run("st.shared::cluster.b32 [{$r0}], {$r1};", address, word)


def add_to_peer(address: Any, word: Int32) -> None:
    """Add to a word of another CTA's shared memory; `address`: see `peer_address`."""
    ptx.run("red.relaxed.cluster.shared::cluster.add.u32 [{$r0}], {$r1};", address, word)
