"""What a worker counts, for Prometheus."""

from prometheus_client import Counter, Gauge, Histogram

ITERATIONS = Counter("legato_worker_iterations", "Iterations finished")
TOKENS_COMPUTED = Counter("legato_worker_tokens_computed", "Tokens whose KV was computed, prefill and decode together")
ITERATION_SECONDS = Histogram(
    "legato_worker_iteration_seconds",
    "Time of one iteration on the device",
    buckets=(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0),
)
SLOTS_IN_USE = Gauge("legato_worker_slots_in_use", "Requests resident on this worker")
PLANS_REFUSED = Counter("legato_worker_plans_refused", "Plans that could not be applied, so that an epoch ended")
STAGE_BUSY_SECONDS = Counter("legato_worker_stage_busy_seconds", "Time that a pipeline stage computed", ["stage"])
STAGE_BUBBLE_SECONDS = Counter(
    "legato_worker_stage_bubble_seconds",
    "Time that a pipeline stage had a plan and waited for another stage",
    ["stage"],
)
