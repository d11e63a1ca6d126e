"""The scheduler's Prometheus metrics. Gauges are read off the core when scraped, so they are right at all times."""

from collections.abc import Iterator

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.clock import NS_PER_S, monotonic_ns
from common.messages.plans import IterationDone
from common.messages.requests import FinishReason, RejectReason, RequestRejected
from services.scheduler.core import SchedulerCore
from services.scheduler.events import RequestFinished, RunIteration, SendStreams
from services.scheduler.recording.recorder import Recorder

_ITERATION_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)

REQUESTS_ENDED = Counter("legato_scheduler_requests_ended", "Requests that left the scheduler.", ["reason"])
TOKENS_SAMPLED = Counter("legato_scheduler_tokens_sampled", "Output tokens that workers sampled.")
PREEMPTIONS = Counter("legato_scheduler_preemptions", "Requests whose KV blocks were taken back.")
RECOMPUTED_TOKENS = Counter("legato_scheduler_recomputed_tokens", "Tokens whose KV was lost to preemption.")
WORKERS_LOST = Counter("legato_scheduler_workers_lost", "Workers that left or were dismissed.")
ITERATION_TOKENS = Histogram(
    "legato_scheduler_iteration_tokens",
    "Tokens planned per iteration.",
    buckets=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
)
ITERATION_SECONDS = Histogram(
    "legato_scheduler_iteration_seconds",
    "Time that workers took per iteration.",
    buckets=_ITERATION_BUCKETS_S,
)
PREDICTED_SECONDS = Histogram(
    "legato_scheduler_iteration_predicted_seconds",
    "Time that workers were predicted to take per iteration.",
    buckets=_ITERATION_BUCKETS_S,
)
PREFILL_TOKENS = Counter("legato_scheduler_prefill_tokens", "Tokens of prompts planned.")
REJECTIONS = Counter("legato_scheduler_requests_rejected", "Requests that never ran.", ["reason"])
PROMPT_TOKENS = Counter("legato_scheduler_prompt_tokens", "Tokens of the prompts of requests that have left.")
PREFIX_HIT_TOKENS = Counter("legato_scheduler_prefix_hit_tokens", "Of prompt_tokens, those found in the prefix cache.")
QUEUE_SECONDS = Histogram(
    "legato_scheduler_queue_seconds",
    "From a request's arrival to its first chunk.",
    buckets=[0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60],
)

# Each reason from the start, so that a rate sees the first one.
for finish_reason in FinishReason:
    REQUESTS_ENDED.labels(finish_reason)
for reject_reason in RejectReason:
    REJECTIONS.labels(reject_reason)


def note_plan(plan: RunIteration) -> None:
    """An iteration has been planned."""
    num_tokens = plan.num_tokens
    ITERATION_TOKENS.observe(num_tokens)
    PREDICTED_SECONDS.observe(plan.predicted_ns / NS_PER_S)
    if plan.chunks:
        PREFILL_TOKENS.inc(num_tokens - len(plan.decodes))


def note_result(done: IterationDone) -> None:
    """An iteration has come back."""
    ITERATION_SECONDS.observe((done.finished_ns - done.started_ns) / NS_PER_S)


def note_streams(effect: SendStreams) -> None:
    """Tokens and ends have been told to a tokenizer."""
    batch = effect.batch
    if batch.sampled:
        TOKENS_SAMPLED.inc(len(batch.sampled))
    for ended in batch.ended:
        if isinstance(ended, RequestRejected):
            REJECTIONS.labels(ended.reason).inc()


def note_finished(finished: RequestFinished) -> None:
    """A request has left."""
    REQUESTS_ENDED.labels(finished.reason).inc()
    QUEUE_SECONDS.observe(finished.queue_ns / NS_PER_S)
    PROMPT_TOKENS.inc(finished.num_prompt_tokens)
    PREFIX_HIT_TOKENS.inc(finished.num_cached_tokens)


class CoreCollector(Collector):
    """Gauges of one core, and counters that it keeps itself."""

    def __init__(self, core: SchedulerCore, recorder: Recorder | None = None) -> None:
        self._core = core
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        workers = self._core.workers
        yield _gauge("legato_scheduler_workers", "Workers that are up.", len(workers))
        yield _gauge("legato_scheduler_requests_waiting", "Requests in the queue.", self._core.num_waiting)
        yield _gauge("legato_scheduler_requests_running", "Requests on a worker.", sum(len(w.running) for w in workers))
        yield _gauge("legato_scheduler_kv_blocks", "KV blocks of all workers.", sum(w.pool.num_blocks for w in workers))
        yield _gauge(
            "legato_scheduler_kv_blocks_used",
            "KV blocks that requests hold.",
            sum(w.pool.num_blocks - w.pool.num_free for w in workers),
        )
        yield _gauge(
            "legato_scheduler_margin_seconds",
            "The largest margin between a prediction and its deadline among the workers.",
            max((w.margin.ns / 1e9 for w in workers), default=0.0),
        )
        yield _gauge(
            "legato_scheduler_prediction_error",
            "Running mean of the relative error of predicted iteration times, of the worst worker.",
            max((w.fit.error for w in workers), default=0.0),
        )
        now_ns = monotonic_ns()
        budgets = [self._core.budget(worker, now_ns) for worker in workers]
        yield _gauge(
            "legato_scheduler_token_budget",
            "Tokens that the next iteration may compute, decodes included; of the tightest worker.",
            min((budget.token_budget for budget in budgets), default=0),
        )
        yield _gauge(
            "legato_scheduler_tbt_target_seconds",
            "The longest time between two tokens of a stream that is on time, unless its request says otherwise.",
            self._core.limits.tbt_target_ns / NS_PER_S,
        )
        yield _counter("legato_scheduler_gaps", "Gaps between tokens of a stream, at the workers.", self._core.num_gaps)
        yield _counter("legato_scheduler_gaps_late", "Of them, above their target.", self._core.num_late_gaps)
        yield _counter(
            "legato_scheduler_recording_steps_lost",
            "Steps of the core that the flight recorder could not write.",
            0 if self._recorder is None else self._recorder.num_lost,
        )


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, documentation, value=value)


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, value=value)
