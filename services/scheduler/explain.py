"""`legato explain`: what the token budget is now, and which stream and which term of the cost model set it."""

import argparse
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

import msgspec

from services.scheduler.budget import Budget

TIMEOUT_S = 10.0
ENVIRONMENT = "LEGATO_SCHEDULER_ADMIN"

DESCRIPTION = """Ask a running scheduler, at its admin port, how many tokens each worker's next iteration may compute,
and why. `legato up` prints that address when it starts."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler answers at /explain."""

    tbt_target_ms: float
    late_share: float
    policy: str
    num_waiting: int
    budgets: tuple[Budget, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the explanation; return the exit status."""
    parser = argparse.ArgumentParser(prog="legato explain", description=DESCRIPTION)
    parser.add_argument(
        "--admin",
        default=os.environ.get(ENVIRONMENT),
        metavar="URL",
        help=f"admin port of the scheduler, such as http://127.0.0.1:9100 ({ENVIRONMENT})",
    )
    parser.add_argument("--json", action="store_true", help="print what the scheduler answers, as it is")
    flags = parser.parse_args(argv)
    if not flags.admin or not flags.admin.startswith(("http://", "https://")):
        print(f"legato explain: --admin (or {ENVIRONMENT}) must be an http URL", file=sys.stderr)
        return 2
    try:
        with urllib.request.urlopen(f"{flags.admin.rstrip('/')}/explain", timeout=TIMEOUT_S) as response:
            data: bytes = response.read()
        explanation = msgspec.json.decode(data, type=Explanation)
    except (urllib.error.URLError, OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        print(f"legato explain: {flags.admin} is no scheduler's admin port that answers: {error}", file=sys.stderr)
        return 1
    print(data.decode() if flags.json else "\n".join(lines_of(explanation)))
    return 0


def lines_of(explanation: Explanation) -> Iterator[str]:
    """The explanation, for people."""
    yield (
        f"target {explanation.tbt_target_ms:g} ms between tokens, of which {100 * explanation.late_share:g}% may be "
        f"late; policy {explanation.policy}; {explanation.num_waiting} requests wait"
    )
    if not explanation.budgets:
        yield "no worker is up"
    for budget in explanation.budgets:
        yield ""
        yield f"{budget.worker_id}: {budget.token_budget} tokens, {_why(budget)}"
        yield f"  of them {budget.num_decodes} decodes ({budget.decodes_ms:.1f} ms alone)"
        yield f"  and up to {budget.max_prefill_tokens} tokens of a new prompt ({budget.filled_ms:.1f} ms in all)"
        if (tightest := budget.tightest) is not None:
            yield (
                f"  tightest stream {tightest.request_id}: target {tightest.target_ms:g} ms, its next token is due "
                f"{tightest.slack_ms:.1f} ms after the iteration begins"
            )
            yield f"  kept free: margin {budget.margin_ms:.1f} ms, for the ring {budget.allowance_ms:.1f} ms"
        terms = ", ".join(f"{name} {value:.2f}" for name, value in budget.terms_ms.items())
        yield f"  predicted ms by term: {terms}"
        yield f"  another token would cost most in: {budget.binding_term}"


def _why(budget: Budget) -> str:
    """What keeps the budget from being larger, in words."""
    allowed = "" if budget.allowed_ms is None else f"{budget.allowed_ms:.1f} ms"
    return {
        "deadline": f"as many as end within the {allowed} that the tightest stream leaves",
        "turn": f"as many as end within {allowed}: nobody streams, and a newcomer should not wait longer",
        "tokens": "as many as are allowed at all (--token-budget, or what the worker takes)",
        "floor": f"the least that prompts get: decodes leave nothing of {allowed}, so the target will be missed",
        "nothing": "as many as there are",
    }[budget.bound]


if __name__ == "__main__":
    sys.exit(main())
