"""The smallest world around a core: gateways and a scheduler that write down what they are sent."""

from collections.abc import Sequence
from typing import Any

from common.ids import InstanceId, RequestId, TokenizerId, WorkerId, unpack_ids
from common.messages import (
    Cancel,
    Decode,
    Encode,
    PoolCard,
    RequestArrived,
    StopReached,
    StreamBatch,
    Submit,
    TextBatch,
)
from common.messages.cards import ModelCard
from common.messages.gaps import NO_GAP, WorkerGap
from common.messages.requests import (
    Choice,
    FinishReason,
    RequestEnded,
    RequestQueued,
    RequestRejected,
    Sampling,
    Stamps,
    TextDelta,
    TextPrompt,
)
from common.messages.streams import TokensSampled
from services.tokenizer.core import Limits, TokenizerCore
from services.tokenizer.events import (
    DropGateway,
    DropJob,
    DropScheduler,
    Effect,
    Event,
    FromGateway,
    FromScheduler,
    GatewayDown,
    GatewayLink,
    GatewayUp,
    JobDone,
    SchedulerDown,
    SchedulerUp,
    StartJob,
    ToGateway,
    ToScheduler,
)
from services.tokenizer.jobs import Job, JobId, run_job
from services.tokenizer.text.model_tokenizer import ModelTokenizer

STAMPS = Stamps(worker_id=WorkerId(InstanceId("worker-1")), iteration=7, worker_ns=100, scheduler_ns=200)
EOS = 2


def pool_card(**changes: Any) -> PoolCard:
    model = ModelCard(
        name="smollm2",
        max_model_len=64,
        vocab_size=49152,
        eos_token_ids=(EOS,),
        has_penalties=True,
        has_logprobs=True,
    )
    return PoolCard(**{"model": model, "num_workers": 1, "kv_capacity": 1000, "tbt_target_ms": 100.0, **changes})


def submit(*names: str, prompt: Any = "Hello", **changes: Any) -> Submit:
    """A Submit with one choice for each name."""
    fields: dict[str, Any] = {
        "attempt": 1,
        "model": "smollm2",
        "prompt": TextPrompt(text=prompt) if isinstance(prompt, str) else prompt,
        "choices": tuple(Choice(request_id=RequestId(name), seed=index) for index, name in enumerate(names)),
        "sampling": Sampling(),
        "max_tokens": 20,
        **changes,
    }
    return Submit(**fields)


def ended(name: str, reason: FinishReason = FinishReason.LENGTH, **changes: Any) -> RequestEnded:
    fields = {"attempt": 1, "num_prompt_tokens": 1, "num_output_tokens": 3, **changes}
    return RequestEnded(request_id=RequestId(name), reason=reason, **fields)


class World:
    """Drives a core by hand. Jobs wait until the test runs them."""

    def __init__(self, model: ModelTokenizer, *, num_gateways: int = 1, is_ready: bool = True, **limits: int) -> None:
        self._model = model
        self.core = TokenizerCore(
            TokenizerId(InstanceId("tokenizer-1")),
            Limits(**{"max_open_requests": 100, "max_waiting_jobs": 100, **limits}),
        )
        self.to_scheduler: list[RequestArrived | StopReached | Cancel] = []
        self.to_gateway: dict[int, list[Any]] = {}
        self.jobs: dict[JobId, Job] = {}
        self.dropped_jobs: set[JobId] = set()
        self.dropped_gateways: list[int] = []
        self.scheduler_drops: list[str] = []
        for number in range(num_gateways):
            self.step(GatewayUp(GatewayLink(number)))
        if is_ready:
            self.step(SchedulerUp())
            self.step(FromScheduler(pool_card()))

    def step(self, event: Event) -> list[Effect]:
        effects = self.core.step(event)
        for effect in effects:
            match effect:
                case ToScheduler(message):
                    self.to_scheduler.append(message)
                case ToGateway(gateway, message):
                    self.to_gateway.setdefault(gateway, []).append(message)
                case StartJob(job):
                    self.jobs[job.job_id] = job
                case DropJob(job_id):
                    self.dropped_jobs.add(job_id)
                case DropGateway(gateway):
                    self.dropped_gateways.append(gateway)
                case DropScheduler(detail):
                    self.scheduler_drops.append(detail)
        return effects

    def send(self, message: Submit | Cancel | Encode | Decode, gateway: int = 0) -> list[Effect]:
        return self.step(FromGateway(GatewayLink(gateway), message))

    def cancel(self, *names: str, gateway: int = 0) -> list[Effect]:
        return self.send(Cancel(request_ids=tuple(RequestId(name) for name in names)), gateway)

    def run_jobs(self) -> None:
        """Let the threads do all that waits for them; a dropped job has not begun."""
        for job_id, job in sorted(self.jobs.items()):
            self.step(JobDone(job_id, None if job_id in self.dropped_jobs else run_job(job, self._model)))
        self.jobs.clear()

    def arrive(self, *names: str, gateway: int = 0, **changes: Any) -> None:
        """Submit, and encode."""
        self.send(submit(*names, **changes), gateway)
        self.run_jobs()

    def sampled(
        self, name: str, token_ids: Sequence[int], first_index: int, attempt: int = 1, gap: int = NO_GAP
    ) -> TokensSampled:
        return TokensSampled(
            request_id=RequestId(name), attempt=attempt, first_index=first_index, token_ids=tuple(token_ids), gap=gap
        )

    def batch(
        self,
        *sampled: TokensSampled,
        ended: tuple[RequestEnded | RequestRejected, ...] = (),
        queued: tuple[RequestQueued, ...] = (),
        gaps: tuple[WorkerGap, ...] = (),
    ) -> list[Effect]:
        stamps = STAMPS if sampled else None
        return self.step(
            FromScheduler(StreamBatch(queued=queued, sampled=sampled, stamps=stamps, gaps=gaps, ended=ended))
        )

    def lose_gateway(self, gateway: int = 0) -> list[Effect]:
        return self.step(GatewayDown(GatewayLink(gateway)))

    def lose_scheduler(self) -> list[Effect]:
        return self.step(SchedulerDown("the connection closed"))

    def ids(self, text: str) -> list[int]:
        return list(self._model.encoder.encode_text(text))

    # What the world was told.

    def arrivals(self) -> list[RequestArrived]:
        return [message for message in self.to_scheduler if isinstance(message, RequestArrived)]

    def batches(self, gateway: int = 0) -> list[TextBatch]:
        return [message for message in self.to_gateway.get(gateway, []) if isinstance(message, TextBatch)]

    def deltas(self, name: str, gateway: int = 0) -> list[TextDelta]:
        return [delta for batch in self.batches(gateway) for delta in batch.deltas if delta.request_id == name]

    def text(self, name: str, gateway: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas(name, gateway))

    def ends(self, name: str, gateway: int = 0) -> list[RequestEnded | RequestRejected]:
        return [end for batch in self.batches(gateway) for end in batch.ended if end.request_id == name]

    def end(self, name: str, gateway: int = 0) -> RequestEnded | RequestRejected:
        (end,) = self.ends(name, gateway)
        return end

    def rejection(self, name: str, gateway: int = 0) -> RequestRejected:
        end = self.end(name, gateway)
        assert isinstance(end, RequestRejected), end
        return end

    def finish(self, name: str, gateway: int = 0) -> RequestEnded:
        end = self.end(name, gateway)
        assert isinstance(end, RequestEnded), end
        return end


def known_ids(arrival: RequestArrived) -> list[int]:
    return list(unpack_ids(arrival.token_ids))
