"""Who gives way when blocks are short: the newest, to those who stream, and to those of a better priority."""

from collections.abc import Collection

from services.scheduler.account import interrupt
from services.scheduler.events import RequestPreempted
from services.scheduler.placement import AboutToBegin, Placer
from services.scheduler.request import Request
from services.scheduler.waiting import WaitingQueue
from services.scheduler.worker import Worker


class GivingWay:
    """Preempts before a plan is made. Owned by the planner, whose queue it shares."""

    def __init__(self, waiting: WaitingQueue, placer: Placer) -> None:
        self._waiting = waiting
        self._placer = placer
        self.preempted: list[RequestPreempted] = []
        """By the plan in hand; the core takes them."""

    def make_room(self, worker: Worker) -> None:
        """See to it that every decode, and the oldest request whatever it does, has blocks for its next token.

        The newest request gives way to those before it, and no more of them do than blocks are needed. One that a plan
        in flight names is left out of further plans until it can; the oldest never gives way, so progress is certain.
        """
        if worker.has_parked:
            worker.has_parked = False
            for request in worker.running:
                request.placed.is_parked = False
        num_coming = 0
        while (needy := self._first_needy(worker, num_coming)) is not None:
            behind = worker.running[worker.running.index(needy) + 1 :]
            if (victim := _last_that_may(behind)) is None:
                return
            num_coming += self._give_way(victim, needy)

    def _first_needy(self, worker: Worker, num_coming: int) -> Request | None:
        """The best-ranked request that must have a block now and for which there is none left, where so many more will
        be free."""
        num_blocks = worker.pool.num_available + num_coming
        if len(worker.running) <= num_blocks:
            return None  # Each may have one.
        for request in worker.running:
            placement = request.placed
            if placement.is_parked or placement.is_pinned:
                continue
            if placement.num_planned < placement.room:
                continue
            is_due = placement.is_decoding or request is worker.running[0]
            if is_due and placement.has_more:
                if not num_blocks:
                    return request
                num_blocks -= 1
        return None

    def make_way_for_urgent(self, worker: Worker, workers: Collection[Worker]) -> None:
        """Preempt for a waiting request of better priority that finds no room anywhere: the newest of the worst
        priority, of those workers where that will make room on the one that runs the worst-ranked.

        Args:
            worker: Whose plan comes.
            workers: Those that count.
        """
        urgent = self._placer.first_that_fits(workers, self._waiting)
        if urgent is None or worker not in workers or not (lower := _below(urgent, worker)):
            return
        if self._placer.best(workers, urgent, AboutToBegin(worker)) is not None:
            return
        if not self._placer.would_have_room(worker, urgent, lower):
            return
        for other in workers:
            others = _below(urgent, other)
            if others and others[-1].rank > lower[-1].rank and self._placer.would_have_room(other, urgent, others):
                return
        if (victim := _last_that_may(lower)) is not None:
            self._give_way(victim, urgent)

    def _give_way(self, victim: Request, needy: Request) -> int:
        """Preempt it, or park it until it can be; how many blocks will be free then that are not yet."""
        placement = victim.placed
        worker = placement.worker
        if placement.num_in_flight > 0:
            placement.is_parked = worker.has_parked = True
            return worker.pool.num_held_alone(placement.block_table)
        self._preempt(worker, victim, needy)
        return 0

    def _preempt(self, worker: Worker, victim: Request, needy: Request) -> None:
        placement = victim.placed
        worker.running.remove(victim)
        self.preempted.append(
            RequestPreempted(
                request_id=victim.request_id,
                for_request_id=needy.request_id,
                worker_id=worker.worker_id,
                num_tokens=placement.num_computed,
            )
        )
        interrupt(placement, is_worker_lost=False, culprit=needy)
        worker.give_back(placement)
        victim.placement = None
        victim.num_preemptions += 1
        self._waiting.add(victim)


def _below(urgent: Request, worker: Worker) -> list[Request]:
    """What the worker runs of a worse priority, and may preempt; by rank."""
    priority = urgent.arrived.priority
    if not worker.running or worker.running[-1].arrived.priority <= priority:
        return []
    return [it for it in worker.running if it.arrived.priority > priority and not it.placed.is_pinned]


def _last_that_may(requests: list[Request]) -> Request | None:
    """The last of them that may be preempted and is not about to be."""
    return next((it for it in reversed(requests) if not it.placed.is_parked and not it.placed.is_pinned), None)
