"""Rank 0's links to the other ranks: who is there, what they are told, and what stages say.

Plans travel over the same links as everything else in the ring, not over the collectives' own transport. So they are
bounded by credit, arrive while the device still computes, are sealed by the ring's keys where they leave the machine,
and a rank that is gone or silent is seen by socket and heartbeat, however deep in a collective this process's device
thread may wait for it.
"""

import asyncio
import concurrent.futures

import structlog

from common.actor.mailbox import Mailbox
from common.messages.links import Role
from common.messages.ranks import RankMeasure, RankPlan, RankReady, RankStart, StageDone
from common.process import Process
from common.wire.link import LinkFull, Peer, PeerDown, PeerGone, PeerUp, Received
from common.wire.session import Endpoint
from gpu_worker.errors import UnusableModel
from gpu_worker.parallel.errors import RankLost
from gpu_worker.parallel.layout import Layout
from gpu_worker.parallel.progress import Progress

log = structlog.get_logger()


class Ranks:
    """All ranks but this one. Used in the event loop, but for all_ready."""

    def __init__(self, process: Process, layout: Layout, rank_address: str, progress: Progress) -> None:
        """Bind the inbox for the others at rank_address; what stages say of iterations goes to progress.

        Raises:
            OSError: If the address cannot be bound, or leaves loopback while there are no keys.
        """
        self._layout = layout
        self._progress = progress
        self._mailbox = Mailbox()
        self._peers: dict[int, Peer] = {}
        self._ready: dict[int, RankReady] = {}
        self.all_ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Resolves when all ranks have loaded."""
        process.sockets.bind(
            rank_address, Endpoint(hello=process.hello(), peer_roles=frozenset({Role.RANK}), mailbox=self._mailbox)
        )

    async def serve(self, start_timeout_s: float) -> None:
        """Take in what ranks say until one is lost.

        Raises:
            RankLost: Then.
            UnusableModel: If a rank was started with other settings than this one.
        """
        deadline = asyncio.get_running_loop().call_later(start_timeout_s, self._give_up, start_timeout_s)
        try:
            async for event in self._mailbox:
                match event:
                    case PeerUp():
                        self._join(event.peer)
                    case PeerDown():
                        if (rank := self._rank_of(event.peer)) is not None:
                            raise RankLost(rank, event.detail)
                    case RankReady():
                        self._note_ready(0, event)
                    case Received(message=RankReady() as ready):
                        self._note_ready(self._rank_of(event.peer), ready)
                    case Received(message=StageDone() as done):
                        if (rank := self._rank_of(event.peer)) is not None:
                            self._progress.note(rank // self._layout.tp, done)
                    case _Late():
                        absent = [rank for rank in range(1, self._layout.num_ranks) if rank not in self._ready]
                        if absent:
                            raise RankLost(absent[0], f"not ready after {event.timeout_s:g} s")
                    case Received():
                        event.peer.drop(f"rank 0 takes no {type(event.message).__name__}")
        finally:
            deadline.cancel()

    def note_own(self, ready: RankReady) -> None:
        """Rank 0 has loaded its own part."""
        self._mailbox.put(ready)

    def tell(self, message: RankStart | RankMeasure | RankPlan) -> None:
        """Send to every rank.

        Whoever cannot take it is dropped, which ends this worker: the other ranks would wait for it in vain.
        """
        for peer in self._peers.values():
            try:
                peer.send(message)
            except LinkFull as full:
                peer.drop(str(full))
            except PeerGone:
                pass  # Its PeerDown is on its way.

    def dismiss(self) -> None:
        """Say goodbye to every rank; each then ends."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.drop("the process stopped")

    def _join(self, peer: Peer) -> None:
        rank = peer.hello.rank
        if rank is None or not 1 <= rank < self._layout.num_ranks:
            peer.drop(f"rank {rank} is none of 1 to {self._layout.num_ranks - 1}")
        elif rank in self._peers:
            peer.drop(f"rank {rank} is here already")
        else:
            self._peers[rank] = peer
            log.info("rank_joined", rank=rank, instance_id=peer.hello.instance_id)

    def _note_ready(self, rank: int | None, ready: RankReady) -> None:
        """A rank has loaded its part."""
        if rank is None:
            return
        self._ready[rank] = ready
        if len(self._ready) < self._layout.num_ranks:
            return
        own = self._ready[0]
        for other_rank, other in sorted(self._ready.items()):
            if other.settings != own.settings:
                raise UnusableModel(f"rank {other_rank} runs {other.settings}; rank 0 runs {own.settings}")
        self.all_ready.set_result(None)

    def _rank_of(self, peer: Peer) -> int | None:
        """None for one that did not join, or has been dismissed."""
        return next((rank for rank, known in self._peers.items() if known is peer), None)

    def _give_up(self, timeout_s: float) -> None:
        self._mailbox.put(_Late(timeout_s))


class _Late:
    """The time for loading is over."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
