"""The table of a simulated run, and the bar while it goes on."""

import sys
import time
from typing import TextIO

from loadtest.simulate.measures import Outcome
from loadtest.simulate.sketch import QUANTILES

BAR_WIDTH = 30
REDRAW_INTERVAL_S = 0.2


class ProgressBar:
    """A line that is drawn anew on a terminal, and absent elsewhere."""

    def __init__(self, total: int, unit: str, out: TextIO = sys.stderr) -> None:
        self._total = max(1, total)
        self._unit = unit
        self._out = out
        self._is_shown = out.isatty()
        self._drawn_s = 0.0

    def show(self, done: int) -> None:
        """Say how far it has come."""
        now_s = time.monotonic()
        if not self._is_shown or now_s - self._drawn_s < REDRAW_INTERVAL_S:
            return
        self._drawn_s = now_s
        full = BAR_WIDTH * done // self._total
        bar = "#" * full + "-" * (BAR_WIDTH - full)
        print(f"\r[{bar}] {done}/{self._total} {self._unit}", end="", file=self._out, flush=True)

    def close(self) -> None:
        """Take the line away."""
        if self._is_shown:
            print("\r" + " " * (BAR_WIDTH + 40) + "\r", end="", file=self._out, flush=True)


def table_of(outcome: Outcome, source: str) -> str:
    """Return the run's figures for a terminal."""
    found = outcome.as_object()
    lines = [f"{'':22}" + "".join(f"{name:>12}" for name in QUANTILES)]
    for label, key in (
        ("TTFT, ms", "ttft_ms"),
        ("TBT, ms", "tbt_ms"),
        ("max gap of stream, ms", "max_gap_ms"),
        ("scheduling delay, ms", "scheduling_delay_ms"),
    ):
        cells = ("-" if value is None else f"{value:.1f}" for value in found[key].values())
        lines.append(f"{label:22}" + "".join(f"{cell:>12}" for cell in cells))
    requests, kv_use = found["requests"], found["kv_use"]
    target_ms = outcome.targets_ns[0] / 1e6
    lines += [
        "",
        f"workload              {source}",
        f"requests              {requests['arrived']} arrived, {requests['finished']} finished, "
        f"{requests['rejected']} rejected",
        f"stalls                {found['stalls']} of {found['gaps']} gaps above {target_ms:g} ms "
        f"({100 * found['late_share']:.3f}%)",
        f"throughput            {found['throughput_tok_s']:.1f} output tokens/s over {found['elapsed_s']:.1f} s",
        f"iterations            {found['iterations']}, mean batch {found['mean_batch']:.1f} rows, device busy "
        f"{100 * found['device_use']:.1f}%",
        f"pipeline bubbles      {100 * found['bubble_share']:.1f}% of the time in which a stage had a plan",
        f"the target            bound {100 * found['bound_share']:.1f}% of iterations",
        f"preemptions           {found['preemptions']}, {found['recomputed_tokens']} tokens to compute again",
        f"KV cache              {100 * kv_use['mean']:.1f}% held on average, {100 * kv_use['max']:.1f}% at most",
        f"prediction            off by {100 * found['prediction_error']:.1f}% on average; margin at the end "
        f"{found['margin_ms']:.1f} ms",
        f"seed                  {found['seed']}",
    ]
    return "\n".join(lines)
