"""The budget from the target against every constant budget, on a device that the predictor does not know."""

import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from loadtest.simulate.experiments.shared import Lab, Result, command_of, table, tell
from loadtest.simulate.measures import Outcome
from loadtest.simulate.options import SimulateOptions
from loadtest.simulate.runs import Job, run_all
from loadtest.simulate.verdict import Criterion

TARGETS_MS = (50.0, 100.0, 200.0)
BUDGETS = (128, 256, 512, 1024, 2048, 4096)
WORKLOADS = {"sharegpt": 500, "arxiv": 180}
"""Requests of each run, two to three minutes of the virtual clock near capacity."""
WARMUP_SHARE = 0.4
"""Of them, how many fill the system before any are counted: more than run at a time."""
NOISE = 0.1
STEP = 1.05
"""Rates are powers of it, so that a run at one rate serves every target."""
FIRST_STEP = {"sharegpt": 20, "arxiv": 0}
"""Where searches begin: 2.7 and 1 requests/s."""
LEAST_STEP, MOST_STEP = -24, 64
"""0.31 to 23 requests/s. What cannot carry the least is not searched further: slow arrivals make long runs."""
CRITERION = Criterion(late_share=0.01)


@dataclass(slots=True)
class Searches:
    """All runs of one system under one seed, by rate, so that none is done twice."""

    options: SimulateOptions  # rate aside
    seed: int
    targets_ms: tuple[float, ...]  # beside that of the options
    seen: dict[int, Outcome] = field(default_factory=dict)

    def capacity(self, index: int, first: int) -> int:
        """The step of the highest rate that holds for the target of that index, searched from first on."""
        held, broken = LEAST_STEP - 1, MOST_STEP + 1
        step, stride = max(first, LEAST_STEP), 2
        while broken - held > 1:
            if self._holds(step, index):
                held = step
            else:
                broken = step
            if held < LEAST_STEP:
                step, stride = max(broken - stride, LEAST_STEP), 2 * stride
            elif broken > MOST_STEP:
                step, stride = min(held + stride, MOST_STEP), 2 * stride
            else:
                step = (held + broken) // 2
        return held

    def _holds(self, step: int, index: int) -> bool:
        if step not in self.seen:
            rate_rps = STEP**step
            job = Job(
                options=replace(self.options, rate=rate_rps),
                seed=self.seed,
                targets_ms=self.targets_ms,
                criterion=CRITERION,
            )
            (self.seen[step],) = run_all([job], 1)
        return CRITERION.holds(self.seen[step], index)


def run(lab: Lab) -> Result:
    """Search the capacity of every budget under every target, on each workload."""
    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        # A search begins where the one before ended: neighbours in the grid, and seeds, differ little.
        near = dict.fromkeys(TARGETS_MS, FIRST_STEP[workload])
        for budget in (*BUDGETS, 0):
            steps: dict[float, list[int]] = {target_ms: [] for target_ms in TARGETS_MS}
            for seed in lab.seeds:
                if budget:
                    # A constant budget does not look at the target: its runs serve all three.
                    shared = _searches(lab, workload, budget, TARGETS_MS, seed)
                for index, target_ms in enumerate(TARGETS_MS):
                    if budget:
                        near[target_ms] = shared.capacity(index, near[target_ms])
                    else:
                        near[target_ms] = _searches(lab, workload, 0, (target_ms,), seed).capacity(0, near[target_ms])
                    steps[target_ms].append(near[target_ms])
            for target_ms, found in steps.items():
                rows.append(_row(workload, target_ms, budget, [_rate(step) for step in found]))
    return page(lab, rows)


def page(lab: Lab, rows: list[dict[str, Any]]) -> Result:
    """Return the result that these rows tell."""
    verdicts = [_verdict(workload, target_ms, rows) for workload in WORKLOADS for target_ms in TARGETS_MS]
    result = Result(
        name="law",
        title="The budget from the target, against every constant",
        object={"rows": rows, "verdicts": verdicts},
        is_as_claimed=all(verdict["holds"] for verdict in verdicts),
    )
    requests = " and ".join(f"{lab.num_requests or count} of {name}" for name, count in WORKLOADS.items())
    result.lines += [
        f"{command_of('law')}. Mistral-7B on one A100-80 whose iterations take what interpolated kernel tables say, "
        f"with launch costs, tile steps and {100 * NOISE:.0f}% noise (uniform), while the scheduler predicts by its "
        "roofline and what it learns. Capacity in requests/s: 99% of gaps within the target, median scheduling delay "
        f"at most 2 s. {lab.num_seeds} seeds, requests: {requests}, of which the first {100 * WARMUP_SHARE:.0f}% "
        f"fill the system and are not counted; rates in steps of {100 * (STEP - 1):.0f}%; "
        f"{lab.data_note}.",
        "",
    ]
    for workload in WORKLOADS:
        result.lines += [f"## {workload}", ""]
        result.lines += table(
            ["target", *(str(budget) for budget in BUDGETS), "from the target", "over the best constant"],
            [
                (
                    f"{target_ms:g} ms",
                    *(_cell(_find(rows, workload, target_ms, budget)) for budget in (*BUDGETS, 0)),
                    _over(next(v for v in verdicts if (v["workload"], v["target_ms"]) == (workload, target_ms))),
                )
                for target_ms in TARGETS_MS
            ],
        )
    result.lines += [
        "Medians of the seeds, and their range. The last column compares seed by seed with the constant that is best "
        "for this workload and target; no constant is best everywhere. One step of the search is "
        f"{100 * (STEP - 1):.0f}%: a ratio of {1 / STEP:.2f} is one step, and the search can tell no less.",
        "",
        "Where a loose target leaves room for more than some 512 tokens an iteration, more of them make the device no "
        "faster, but each stream slower: more requests run at a time, and the bound on those (128 here) is reached "
        "before the device's own limit.",
        "",
    ]
    return result


def _searches(lab: Lab, workload: str, budget: int, targets_ms: tuple[float, ...], seed: int) -> Searches:
    options = lab.options(
        workload=workload,
        truth="tables",
        noise=NOISE,
        token_budget=budget,
        tbt_target_ms=targets_ms[0],
        late_share=CRITERION.late_share,
        requests=lab.num_requests or WORKLOADS[workload],
        warmup_share=WARMUP_SHARE,
    )
    return Searches(options, seed, targets_ms[1:])


def _rate(step: int) -> float:
    """Requests per second; 0 below the least."""
    return round(STEP**step, 4) if step >= LEAST_STEP else 0.0


def _row(workload: str, target_ms: float, budget: int, by_seed: list[float]) -> dict[str, Any]:
    row = {
        "workload": workload,
        "target_ms": target_ms,
        "token_budget": budget or "from the target",
        "capacity_rps": statistics.median(by_seed),
        "by_seed": by_seed,
    }
    tell(f"{workload} {target_ms:g} ms budget {budget or 'law'}: {[round(rate, 3) for rate in by_seed]}")
    return row


def _find(rows: list[dict[str, Any]], workload: str, target_ms: float, budget: int) -> dict[str, Any]:
    wanted = (workload, target_ms, budget or "from the target")
    return next(row for row in rows if (row["workload"], row["target_ms"], row["token_budget"]) == wanted)


def _verdict(workload: str, target_ms: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The law against the constant whose median is highest; equal within the range of the seeds counts as held."""
    constants = [_find(rows, workload, target_ms, budget) for budget in BUDGETS]
    best = max(constants, key=lambda row: row["capacity_rps"])
    ours = _find(rows, workload, target_ms, 0)
    each = [a / b for a, b in zip(ours["by_seed"], best["by_seed"], strict=True) if b]
    return {
        "workload": workload,
        "target_ms": target_ms,
        "best_constant": best["token_budget"],
        "ratio": statistics.median(each) if each else float("inf"),
        "ratio_low": min(each, default=float("inf")),
        "ratio_high": max(each, default=float("inf")),
        "holds": max(each, default=float("inf")) >= 1.0,
    }


def _cell(row: dict[str, Any]) -> str:
    if not row["capacity_rps"]:
        most = max(row["by_seed"])
        return f"below {STEP**LEAST_STEP:.2f}" + (f" (to {most:.2f})" if most else "")
    return f"{row['capacity_rps']:.2f} ({min(row['by_seed']):.2f} to {max(row['by_seed']):.2f})"


def _over(verdict: dict[str, Any]) -> str:
    return (
        f"{verdict['ratio']:.2f} ({verdict['ratio_low']:.2f} to {verdict['ratio_high']:.2f}) of "
        f"{verdict['best_constant']}"
    )
