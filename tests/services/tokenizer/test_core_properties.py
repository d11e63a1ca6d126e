"""Whatever happens, in whatever order: every request has one end, and its text is whole up to there."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.ids import RequestId
from common.messages import Cancel, PoolCard, RequestArrived, StopReached, TextBatch
from common.messages.requests import FinishReason, RequestEnded
from services.tokenizer.events import FromScheduler, GatewayLink, GatewayUp, JobDone, SchedulerUp
from services.tokenizer.jobs import run_job
from services.tokenizer.text.model_tokenizer import ModelTokenizer
from tests.services.tokenizer.world import World, pool_card, submit

MODEL = ModelTokenizer.load("smollm2", None, max_rendered_chars=1000)
STOPS = ("stop", "\n\n", "🦀🦀")
PIECES = ["Hello", "\n", "\n\nand", "sto", "p", "st", "op", "🦀", "é", " stop it"]
MAX_TOKENS = 16


class Ring(RuleBasedStateMachine):
    """A scheduler that keeps its own books of what should be running, and gateways that keep theirs of what came."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(MODEL, num_gateways=2, max_open_requests=6, max_waiting_jobs=3)
        self.gateways = [0, 1]
        self.num_gateways = 2
        self.num_requests = 0
        self.owner: dict[str, int] = {}
        self.running: dict[str, list[int]] = {}  # what the scheduler runs, and the tokens sampled so far
        self.num_read = 0

    def read(self) -> None:
        """The scheduler takes its messages."""
        for message in self.world.to_scheduler[self.num_read :]:
            match message:
                case RequestArrived():
                    assert message.request_id not in self.running
                    self.running[message.request_id] = []
                case StopReached():
                    assert message.num_output_tokens <= len(self.running.pop(message.request_id))
                case Cancel():
                    for request_id in message.request_ids:
                        self.running.pop(request_id, None)
        self.num_read = len(self.world.to_scheduler)

    @initialize()
    def begin(self) -> None:
        self.read()

    @rule(data=st.data(), num_choices=st.integers(1, 3))
    def submit(self, data: st.DataObject, num_choices: int) -> None:
        gateway = data.draw(st.sampled_from(self.gateways))
        names = [f"r{self.num_requests + index}" for index in range(num_choices)]
        self.num_requests += num_choices
        self.owner.update(dict.fromkeys(names, gateway))
        self.world.send(submit(*names, stop=STOPS, max_tokens=MAX_TOKENS), gateway)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def finish_a_job(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.world.jobs)))
        job = self.world.jobs.pop(job_id)
        self.world.step(JobDone(job_id, run_job(job, MODEL)))
        self.read()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.running)), min_size=1, unique=True))
        sampled, ends = [], []
        for name in names:
            known = self.running[name]
            pieces = data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3))
            ids = [token_id for piece in pieces for token_id in self.world.ids(piece)][: MAX_TOKENS - len(known)]
            sampled.append(self.world.sampled(name, ids, first_index=len(known)))
            known.extend(ids)
            if len(known) == MAX_TOKENS or data.draw(st.integers(0, 3)) == 0:
                ends.append(self.ended(name, FinishReason.LENGTH))
                del self.running[name]
        self.world.batch(*sampled, ended=tuple(ends))
        self.read()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        names = [name for name, gateway in self.owner.items() if gateway in self.gateways]
        if names:
            name = data.draw(st.sampled_from(names[-8:]))
            self.world.cancel(name, gateway=self.owner[name])
            self.read()

    @precondition(lambda self: len(self.gateways) > 1)
    @rule(data=st.data())
    def lose_a_gateway(self, data: st.DataObject) -> None:
        gateway = data.draw(st.sampled_from(self.gateways))
        self.gateways.remove(gateway)
        self.world.lose_gateway(gateway)
        self.read()
        assert not any(self.owner[name] == gateway for name in self.running)

    @rule()
    def a_gateway_comes(self) -> None:
        self.gateways.append(self.num_gateways)
        self.world.step(GatewayUp(GatewayLink(self.num_gateways)))
        self.num_gateways += 1

    @rule()
    def lose_the_scheduler(self) -> None:
        self.world.lose_scheduler()
        self.read()
        self.running.clear()
        assert self.world.core.num_open == 0
        self.world.step(SchedulerUp())
        self.world.step(FromScheduler(pool_card()))

    def ended(self, name: str, reason: FinishReason) -> RequestEnded:
        return RequestEnded(
            request_id=RequestId(name),
            attempt=1,
            reason=reason,
            num_prompt_tokens=1,
            num_output_tokens=len(self.running[name]),
        )

    @invariant()
    def every_stream_is_whole(self) -> None:
        for gateway in self.gateways:
            check_streams([m for m in self.world.to_gateway.get(gateway, []) if not isinstance(m, PoolCard)])

    @invariant()
    def nothing_runs_that_is_not_open(self) -> None:
        assert self.world.core.num_open >= len(self.running)

    def teardown(self) -> None:
        """Once all is drained, each request of a gateway that is still there has had its one end."""
        while self.world.jobs:
            self.world.run_jobs()
            self.read()
        ends = tuple(self.ended(name, FinishReason.LENGTH) for name in self.running)
        self.world.batch(ended=ends)
        for name, gateway in self.owner.items():
            if gateway in self.gateways:
                assert len(self.world.ends(name, gateway)) == 1, name
        assert self.world.core.num_open == 0


def check_streams(batches: Sequence[TextBatch]) -> None:
    ids: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    over: set[str] = set()
    for batch in batches:
        for delta in batch.deltas:
            assert delta.request_id not in over, "nothing comes after the end"
            assert delta.first_index == len(ids.setdefault(delta.request_id, []))
            assert delta.text_offset == len(texts.setdefault(delta.request_id, ""))
            ids[delta.request_id] += delta.token_ids
            texts[delta.request_id] += delta.text
        for end in batch.ended:
            assert end.request_id not in over, "one end"
            over.add(end.request_id)
            if isinstance(end, RequestEnded):
                output = ids.get(end.request_id, [])
                assert end.num_output_tokens == len(output)
                check_text(end, MODEL.decode(output), texts.get(end.request_id, ""))


def check_text(end: RequestEnded, whole: str, text: str) -> None:
    match end.reason:
        case FinishReason.STOP:
            assert isinstance(end.stop, str)
            assert whole.startswith(text + end.stop)
            assert not any(stop in text for stop in STOPS)
        case FinishReason.LENGTH:
            assert text == whole
            assert not any(stop in text for stop in STOPS)
        case _:
            assert whole.startswith(text)


TestRing = Ring.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
