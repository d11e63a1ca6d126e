"""What a simulated worker counts beside the metrics of every worker."""

from prometheus_client import Histogram

LATENESS_SECONDS = Histogram(
    "legato_worker_simulated_lateness_seconds",
    "From the moment at which a simulated iteration ended until its result left: the simulation's own error",
    buckets=(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
)
