"""What holds in every world, however events fall."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.messages.requests import Sampling
from services.scheduler.events import Bound, RequestPreempted
from services.scheduler.policy import POLICIES
from tests.services.scheduler.world import World, token_at

DRAINED = 3000
"""Iterations in which every world below must be done: it has at most 60 requests of at most 60 tokens."""


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, cancellations, stops, losses, refusals and results in any order, over tiny KV pools.

    World checks after every event that each block is free or held once, that no plan reads or writes what is not its
    request's, that none computes more tokens than its worker takes, that no token comes twice, out of order, or after
    an end, that the parts of every gap sum to it, and that of each stream only plans of one micro-batch are in flight.
    """

    num_stages = 1  # of each worker

    @initialize(
        depth=st.sampled_from([1, 2]),
        num_workers=st.integers(1, 3),
        num_blocks=st.integers(4, 24),
        token_budget=st.none() | st.integers(1, 24),
        max_running=st.integers(1, 8),
        policy=st.sampled_from(sorted(POLICIES)),
        has_prefix_cache=st.booleans(),
        max_preemptions=st.integers(0, 3),
        max_chunk_tokens=st.integers(6, 48),
    )
    def begin(
        self,
        depth: int,
        num_workers: int,
        num_blocks: int,
        token_budget: int | None,
        max_running: int,
        policy: str,
        has_prefix_cache: bool,
        max_preemptions: int,
        max_chunk_tokens: int,
    ) -> None:
        self.world = World(
            depth=depth,
            policy=policy,
            has_prefix_cache=has_prefix_cache,
            max_preemptions=max_preemptions,
            num_workers=num_workers,
            num_blocks=num_blocks,
            token_budget=token_budget,
            max_running=max_running,
            max_num_slots=6,
            max_chunk_tokens=max_chunk_tokens,
            pipeline_parallel=self.num_stages,
            max_losses=10**6,
            max_refusals=10**6,
            plan_timeout_ns=10**18,
        )
        self.is_chunked = POLICIES[policy].is_chunked
        self.token_budget = token_budget if self.is_chunked else None
        self.max_preemptions = max_preemptions
        self.prompts: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.ranks: dict[str, tuple[int, int]] = {}
        self.cancelled: set[str] = set()
        self.num_checked = 0
        self.watch()

    def watch(self) -> None:
        """For machines that look at more: the world has begun."""

    @precondition(lambda self: len(self.prompts) < 60)
    @rule(
        prompt_len=st.integers(1, 40),
        max_tokens=st.integers(1, 20),
        priority=st.integers(-1, 1),
        stop_at=st.none() | st.integers(0, 10),
        family=st.integers(0, 2),
        salt=st.sampled_from(["", "tenant"]),
    )
    def arrive(
        self, prompt_len: int, max_tokens: int, priority: int, stop_at: int | None, family: int, salt: str
    ) -> None:
        name = f"request-{len(self.prompts)}"
        stops = () if stop_at is None else (token_at(name, prompt_len + stop_at),)
        self.prompts[name], self.most[name] = prompt_len, max_tokens
        self.ranks[name] = (priority, len(self.ranks))
        sampling = Sampling(temperature=0, stop_token_ids=stops)
        self.world.arrive(
            name,
            prompt_len=prompt_len,
            tokens=[1000 * family + position for position in range(prompt_len)],  # Families share their prefixes.
            max_tokens=max_tokens,
            priority=priority,
            sampling=sampling,
            cache_salt=salt,
        )

    @precondition(lambda self: any(self.world.plans.values()))
    @rule(data=st.data(), idle_ns=st.integers(0, 10**8), took_ns=st.integers(0, 10**8))
    def finish(self, data: st.DataObject, idle_ns: int, took_ns: int) -> None:
        busy = [worker for worker, plans in self.world.plans.items() if plans]
        self.world.finish_iteration(data.draw(st.sampled_from(busy)), idle_ns=idle_ns, took_ns=took_ns)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        if name not in self.world.terminals and name not in self.world.stopped:
            self.cancelled.add(name)
        self.world.cancel(name)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.world.stop(name, len(self.world.output[name]))

    @precondition(lambda self: any(self.world.plans.values()))
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        busy = [worker for worker, plans in self.world.plans.items() if plans]
        self.world.refuse(data.draw(st.sampled_from(busy)))

    @precondition(lambda self: len(self.world.devices) > 1)
    @rule(data=st.data())
    def lose_worker(self, data: st.DataObject) -> None:
        self.world.lose(data.draw(st.sampled_from(sorted(self.world.devices))))

    @precondition(lambda self: len(self.world.devices) < 3)
    @rule()
    def join(self) -> None:
        self.world.join()

    @invariant()
    def prefill_keeps_to_the_budget(self) -> None:
        for plan in self.world.iterations[self.num_checked :]:
            num_prefill = plan.num_tokens - len(plan.decodes)
            assert self.token_budget is None or num_prefill <= max(self.token_budget - len(plan.decodes), 1)
            if self.is_chunked and plan.chunks and plan.allowed_ns is not None and plan.bound is not Bound.FLOOR:
                assert plan.predicted_ns <= plan.allowed_ns
        self.num_checked = len(self.world.iterations)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.drain(DRAINED)
        world.check_drained()
        preempted = [effect for effect in world.effects if isinstance(effect, RequestPreempted)]
        assert max(Counter(effect.request_id for effect in preempted).values(), default=0) <= self.max_preemptions
        for effect in preempted:
            assert self.ranks[effect.request_id] > self.ranks[effect.for_request_id], "nobody gives way to a later one"
        for name, prompt_len in self.prompts.items():
            if name in world.stopped:
                continue
            assert len(world.terminals[name]) == 1
            output = world.output[name]
            assert output == world.expected_output(name, prompt_len, len(output)), "every token as if undisturbed"
            if name in self.cancelled:
                assert world.reason(name) == "cancelled"
            elif world.reason(name) == "length":
                assert len(output) == self.most[name]
            else:
                assert world.reason(name) in ("stop", "too_large")


SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
test_scheduler = SchedulerMachine.TestCase


class TwoStagesMachine(SchedulerMachine):
    num_stages = 2


class ThreeStagesMachine(SchedulerMachine):
    num_stages = 3


TwoStagesMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
ThreeStagesMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
test_scheduler_of_two_stages = TwoStagesMachine.TestCase
test_scheduler_of_three_stages = ThreeStagesMachine.TestCase
