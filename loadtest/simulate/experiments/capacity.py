"""Capacity under the paper's strict and relaxed targets: stall_free against the schedulers that it replaced."""

from dataclasses import dataclass
from typing import Any

import msgspec

from loadtest.simulate.capacity import CapacityOptions, Found, search
from loadtest.simulate.experiments.shared import Lab, Result, command_of, table, tell

BASELINES = ("prefill_first", "orca")
WHOLE_PROMPTS = 8192
"""Tokens of an iteration of the baselines, which do not chunk: the longest request of the trace."""
DECLARED_MAX_TOKENS = 1024
"""Requests ask for at most so many and end before: what Orca sets KV aside for."""
RELAXED = 5.0
PRECISION_PERCENT = 7.0
WARMUP_SHARE = 0.3
"""Of the requests, how many fill the system before any are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One system of the paper."""

    model: str
    tp: int
    strict_ms: float
    first_rps: float
    num_requests: int
    paper: dict[str, float]  # factor over each baseline under the strict target


CASES = (
    Case(model="mistral-7b", tp=1, strict_ms=100.0, first_rps=2.0, num_requests=500, paper={"prefill_first": 2.6}),
    Case(
        model="yi-34b",
        tp=2,
        strict_ms=200.0,
        first_rps=1.0,
        num_requests=350,
        paper={"prefill_first": 3.7, "orca": 4.0},
    ),
)


def run(lab: Lab) -> Result:
    """Search the capacity of each policy, for each model and target."""
    rows: list[dict[str, Any]] = []
    for case in CASES:
        for name, target_ms in (("strict", case.strict_ms), ("relaxed", RELAXED * case.strict_ms)):
            for policy in ("stall_free", *BASELINES):
                found = _search(lab, case, policy, target_ms)
                row = {"model": case.model, "target": name, "target_ms": target_ms, "policy": policy}
                rows.append(row | msgspec.to_builtins(found))
                tell(f"{row}: {found.rate_rps:.3f} ({found.low_rps:.3f} to {found.high_rps:.3f})")
    factors = [factor for case in CASES for name in ("strict", "relaxed") for factor in _factors(case, name, rows)]
    result = Result(
        name="capacity",
        title="Capacity under a TBT target",
        object={"rows": rows, "factors": factors},
        is_as_claimed=all(factor["low"] > 1 for factor in factors if factor["target"] == "strict"),
    )
    result.lines += [
        f"{command_of('capacity')}. The highest rate of Poisson arrivals at which 99% of all gaps are within the "
        "target and the median scheduling delay is at most 2 s; sharegpt lengths, at most 128 requests running, "
        f"requests that declare {DECLARED_MAX_TOKENS} output tokens; bisection to {PRECISION_PERCENT:g}%, "
        f"{lab.num_seeds} seeds, "
        f"{' and '.join(f'{lab.num_requests or case.num_requests} requests for {case.model}' for case in CASES)}, the "
        f"first {100 * WARMUP_SHARE:.0f}% not counted; "
        f"{lab.data_note}. stall_free derives its budget from the target (late share 1%); prefill_first and orca take "
        f"whole prompts up to {WHOLE_PROMPTS} tokens an iteration.",
        "",
        *table(
            ["model", "target", "policy", "capacity, requests/s (range of seeds)"],
            [
                (
                    row["model"],
                    f"{row['target']}, {row['target_ms']:g} ms",
                    row["policy"],
                    f"{row['rate_rps']:.2f} ({row['low_rps']:.2f} to {row['high_rps']:.2f})",
                )
                for row in rows
            ],
        ),
        "## stall_free over the others",
        "",
        *table(
            ["model", "target", "over", "factor (range of seeds)", "paper", "difference"],
            [
                (
                    factor["model"],
                    factor["target"],
                    factor["over"],
                    f"{factor['factor']:.2f} ({factor['low']:.2f} to {factor['high']:.2f})",
                    factor["paper"] or "-",
                    f"{100 * (factor['factor'] / factor['paper'] - 1):+.0f}%" if factor["paper"] else "-",
                )
                for factor in factors
            ],
        ),
    ]
    result.lines += [
        "The paper's factors are over vLLM of 2023 (prefill_first) and Orca, at most over its workloads.",
        "",
    ]
    return result


def _search(lab: Lab, case: Case, policy: str, target_ms: float) -> Found:
    options = CapacityOptions(
        **lab.system(
            model=case.model,
            tp=case.tp,
            policy=policy,
            tbt_target_ms=target_ms,
            token_budget=0 if policy == "stall_free" else WHOLE_PROMPTS,
            max_tokens=DECLARED_MAX_TOKENS,
            late_share=0.01,
            requests=lab.num_requests or case.num_requests,
            warmup_share=WARMUP_SHARE,
            rate=case.first_rps,
            precision_percent=PRECISION_PERCENT,
            seed=lab.seeds,
        )
    )
    return search(options)


def _factors(case: Case, target: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The factor of each seed: both systems saw the same arrivals."""
    by_policy = {row["policy"]: row for row in rows if (row["model"], row["target"]) == (case.model, target)}
    ours = by_policy["stall_free"]
    factors = []
    for policy in BASELINES:
        theirs = by_policy[policy]
        each = [a / b for a, b in zip(ours["by_seed"], theirs["by_seed"], strict=True) if b]
        factors.append(
            {
                "model": case.model,
                "target": target,
                "over": policy,
                "factor": ours["rate_rps"] / theirs["rate_rps"] if theirs["rate_rps"] else float("inf"),
                "low": min(each, default=float("inf")),
                "high": max(each, default=float("inf")),
                "paper": case.paper.get(policy) if target == "strict" else None,
            }
        )
    return factors
