"""Table 4 of the Sarathi-Serve paper: hybrid batches, chunks, and both together."""

import statistics
from typing import Any

from loadtest.simulate.experiments.shared import Lab, Result, command_of, table, tell
from loadtest.simulate.measures import Outcome
from loadtest.simulate.runs import Job, run_all

POLICIES = ("hybrid_only", "chunked_only", "stall_free")
PAPER_S = {
    "sharegpt": {"hybrid_only": (0.53, 0.68), "chunked_only": (1.04, 0.17), "stall_free": (0.76, 0.14)},
    "arxiv": {"hybrid_only": (3.78, 1.38), "chunked_only": (5.38, 0.20), "stall_free": (3.90, 0.17)},
}
"""Median TTFT and P99 TBT of each policy."""
RATES_RPS = {"sharegpt": (0.6, 0.75, 0.9), "arxiv": (0.3, 0.36, 0.42)}
"""The paper does not say at which load its table was taken: from light to near what the system carries."""
NUM_REQUESTS = 400
WHOLE_PROMPTS = 16384
"""Budget of hybrid_only, which does not chunk: the longest prompt."""


def run(lab: Lab) -> Result:
    """Simulate each policy on each workload at each rate."""
    cases = [
        (workload, rate_rps, policy)
        for workload, rates in RATES_RPS.items()
        for rate_rps in rates
        for policy in POLICIES
    ]
    found: list[dict[str, Any]] = []
    for workload, rate_rps, policy in cases:
        options = lab.options(
            model="yi-34b",
            tp=2,
            workload=workload,
            rate=rate_rps,
            requests=lab.num_requests or NUM_REQUESTS,
            policy=policy,
            token_budget=WHOLE_PROMPTS if policy == "hybrid_only" else 1024,
        )
        outcomes = run_all([Job(options=options, seed=seed) for seed in lab.seeds], lab.processes)
        row = {"workload": workload, "rate_rps": rate_rps, "policy": policy, **_figures(outcomes)}
        tell(str(row))
        found.append(row)
    orders = [_order(workload, rate_rps, found) for workload, rates in RATES_RPS.items() for rate_rps in rates]
    result = Result(
        name="ablation",
        title="Hybrid batches and chunks, alone and together",
        object={"rows": found, "paper_s": PAPER_S, "orders": orders},
        is_as_claimed=all(order["holds"] for order in orders),
    )
    result.lines += [
        f"{command_of('ablation')}. Yi-34B on 2 x A100-80 (TP 2), token budget 1024 (hybrid_only: whole prompts, up to "
        f"8192 tokens of them or one that is longer), at most 128 requests running; "
        f"{lab.num_requests or NUM_REQUESTS} requests, means of {lab.num_seeds} seeds (least to greatest); "
        f"{lab.data_note}. Times in seconds. Paper: Table 4 of Sarathi-Serve (OSDI 2024), whose load is not stated.",
        "",
        *table(
            ["workload", "rate, 1/s", "policy", "P50 TTFT", "paper", "P99 TBT", "paper", "P99 of a stream's max gap"],
            [
                (
                    row["workload"],
                    row["rate_rps"],
                    row["policy"],
                    _spread(row["ttft_p50_s"]),
                    PAPER_S[row["workload"]][row["policy"]][0],
                    _spread(row["tbt_p99_s"]),
                    PAPER_S[row["workload"]][row["policy"]][1],
                    f"{row['max_gap_p99_s']:.2f}",
                )
                for row in found
            ],
        ),
        "## The ordering",
        "",
        *[_sentence(order) for order in orders],
        "",
        *NOTES,
    ]
    return result


NOTES = [
    "## The differences",
    "",
    "- *P99 TBT of chunked_only and stall_free* lies about a third above the paper's on both workloads: it is the time "
    "of one iteration of 1024 tokens, which the roofline puts at 0.17 s without decodes and the artifact of the paper "
    "measured at 0.21 s; the table's 0.14 s is below either.",
    "- *Median TTFT of stall_free on short prompts* is as good as that of hybrid_only, where the paper loses 0.2 s to "
    "it: here the shortest of several waiting prompts may pass a long one, which the paper's algorithm does not do.",
    "- *Rates*: the paper gives none for this table. On sharegpt hybrid_only at the highest rate meets both of the "
    "paper's figures; on arxiv its P99 TBT is met between the lower two, where all median TTFTs are about half of the "
    "paper's: our device reads prompts faster, and its queue is shorter.",
    "",
]


def _figures(outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "ttft_p50_s": [round((outcome.ttft.quantile(0.5) or 0.0) / 1e9, 4) for outcome in outcomes],
        "tbt_p99_s": [round((outcome.tbt.quantile(0.99) or 0.0) / 1e9, 4) for outcome in outcomes],
        "max_gap_p99_s": max((outcome.max_gap.quantile(0.99) or 0.0) / 1e9 for outcome in outcomes),
    }


def _order(workload: str, rate_rps: float, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Who is best and worst, by the means over the seeds."""
    rows = {row["policy"]: row for row in found if (row["workload"], row["rate_rps"]) == (workload, rate_rps)}
    ttft = {policy: statistics.mean(row["ttft_p50_s"]) for policy, row in rows.items()}
    tbt = {policy: statistics.mean(row["tbt_p99_s"]) for policy, row in rows.items()}
    order = {
        "workload": workload,
        "rate_rps": rate_rps,
        "best_ttft": min(ttft, key=lambda policy: ttft[policy]),
        "worst_ttft": max(ttft, key=lambda policy: ttft[policy]),
        "best_tbt": min(tbt, key=lambda policy: tbt[policy]),
        "worst_tbt": max(tbt, key=lambda policy: tbt[policy]),
        "stall_free_ttft_over_hybrid_only": round(ttft["stall_free"] / ttft["hybrid_only"], 3),
    }
    wanted = {"worst_ttft": "chunked_only", "best_tbt": "stall_free", "worst_tbt": "hybrid_only"}
    # stall_free may share the best TTFT: see the notes.
    is_best = order["best_ttft"] in ("hybrid_only", "stall_free")
    return order | {"holds": is_best and all(order[name] == policy for name, policy in wanted.items())}


def _sentence(order: dict[str, Any]) -> str:
    return (
        f"- {order['workload']} at {order['rate_rps']}/s: best TTFT {order['best_ttft']}, worst {order['worst_ttft']}; "
        f"best TBT {order['best_tbt']}, worst {order['worst_tbt']}; stall_free's TTFT is "
        f"{order['stall_free_ttft_over_hybrid_only']} of hybrid_only's."
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
