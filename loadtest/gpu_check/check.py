"""The stages, in order of their worth: right first, then fast. No stage depends on one attention back end."""

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import structlog

from common.cost.devices import DEVICES
from common.cost.fit import Fit
from common.cost.roofline import Roofline
from gpu_worker.attention import cuda_backends
from gpu_worker.attention.triton import InvariantTritonAttention
from gpu_worker.check.engine import check_engine
from gpu_worker.check.invariance import check_invariance
from gpu_worker.check.kernels import MAX_ERROR, check_attention, check_operations
from gpu_worker.check.ranks import RankFailed, check_collectives, check_ranks
from gpu_worker.check.sampling import LEAST_AGREEMENT, check_sampling
from gpu_worker.check.setup import (
    FULL,
    TINY,
    Bench,
    build_bench,
    bytes_needed,
    candidates,
    num_devices,
    open_device,
    preferred,
    spec_of,
)
from gpu_worker.check.speed import (
    Measured,
    decode_speed,
    host_gaps,
    hybrid_speed,
    launch_without_waiting,
    peaks,
    prefill_speed,
)
from gpu_worker.cuda.kinds import kind_of
from loadtest.gpu_check.stages import Deadline, Failed, Report, Skipped, run_stage
from loadtest.gpu_check.stall import CONTENDERS, StallTest, card_of

MAX_TO_FLOOR = 1.6
"""Decode time over the time that reading its bytes takes, at the bar's batch and context."""
LEAST_MFU = 0.55
MFU_CASE = "1024 after 0"
STALL_SLACK = 1.15
"""The largest gap may be this much above the target where the budget is derived from it."""
MAX_HOST_GAP_MS = 0.2
MAX_CAPTURE_S = 20.0
FITTED_ERROR = 0.06
FIT_ROUNDS = 20
BAR_DEVICE = "h200"
"""The bars of speed are for this GPU; on others the numbers are told and nothing fails."""

RANKS = ((2, 1), (1, 2), (2, 2))
"""By tp and pp."""
HOST_PATIENCE = 8.0
"""On a CPU, which has other work, a stage may take so many times as long: nobody pays for it by the minute."""

Stage = Callable[[Deadline, dict[str, Any]], None]


def run_check(options: argparse.Namespace, budget_end: float) -> int:
    """Run the stages that options name, and print their lines; return the exit status."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))  # Lines of JSON, and errors, alone.
    check = Check(options)
    stages: list[tuple[str, float, Stage]] = [
        # Longer than it computes: the first one reads gigabytes of libraries from what may be a cold disk.
        ("probe", 60, check.probe),
        ("kernels", 60, check.kernels),
        ("engine", 60, check.engine),
        ("graphs", 40, check.graphs),
        ("deterministic", 40, check.deterministic),
        ("decode", 60, check.decode),
        ("prefill", 40, check.prefill),
        ("hybrid", 40, check.hybrid),
        ("stall", 80, check.stall),
        ("host", 20, check.host),
        ("fit", 10, check.fit),
        # Last: a collective that hangs takes the process with it.
        ("ranks", 60, check.ranks),
    ]
    wanted = {name.strip() for name in options.stages.split(",") if name.strip()}
    if unknown := wanted - {name for name, _, _ in stages}:
        print(f"legato gpu-check: no stage {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    patience = HOST_PATIENCE if options.device == "cpu" else 1.0
    # Line by line: a stage that hangs ends the process.
    with nullcontext() if options.output is None else options.output.open("w", encoding="utf-8") as copy:
        report = Report(sys.stdout, copy)
        for name, seconds, run in stages:
            if not wanted or name in wanted:
                run_stage(report, name, seconds * patience, run, budget_end)
        counts = {
            status: sum(line["status"] == status for line in report.lines) for status in ("passed", "failed", "skipped")
        }
        report.add({"stage": "all", "status": "failed" if report.has_failed else "passed", **counts})
    return int(report.has_failed)


class Check:
    """What the stages share: the device, and the model as soon as one needs it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._scale = TINY if options.tiny else FULL
        self._device = open_device(options.device)
        self._bench: Bench | None = None
        self._measured: list[Measured] = []

    @property
    def _has_bars(self) -> bool:
        return kind_of(self._device.name) == BAR_DEVICE and not self._options.tiny

    def probe(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """What there is, and what of it serves."""
        detail["device"] = self._device.name
        detail["python"] = sys.version.split()[0]
        names = ("torch", "triton", "flash-attn", "flash_attn_3", "numpy", "msgspec")
        detail["versions"] = {name: text for name in names if (text := _version(name)) is not None}
        free_bytes, total_bytes = self._device.free_bytes()
        detail["memory_gib"] = {"free": round(free_bytes / 2**30, 1), "total": round(total_bytes / 2**30, 1)}
        found = candidates(spec_of(self._scale, self._device))
        detail["backends"] = {
            candidate.backend.name: f"{'ok' if candidate.is_available else 'no'}: {candidate.detail}"
            for candidate in found
        }
        detail |= peaks(self._device, is_tiny=self._options.tiny)
        if not any(candidate.is_available for candidate in found):
            raise Failed("no attention back end serves here")

    def kernels(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """Attention back ends and fused passes against float32."""
        dtype = self._scale.dtype
        operations = check_operations(self._device, dtype)
        detail["operations"] = {name: float(f"{error:.2e}") for name, error in operations.items()}
        detail["sampling_agreement"] = check_sampling(self._device, num_rows=16 if self._options.tiny else 96)
        results = check_attention(self._device, dtype, is_tiny=self._options.tiny, is_over=deadline.is_over)
        detail["attention"] = results
        wrong = [name for name, error in operations.items() if not error < MAX_ERROR[dtype]]
        if detail["sampling_agreement"] < LEAST_AGREEMENT:
            wrong.append("sampling")
        wrong += [
            f"{name}: {case}"
            for name, result in results.items()
            if isinstance(result, dict)
            for case in result["wrong"]
        ]
        if wrong:
            raise Failed(f"off by more than {MAX_ERROR[dtype]:g}: {'; '.join(wrong)}")

    def engine(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """Chunks, hybrid batches and decodes against the dense model."""
        bench = self._ready()
        detail |= check_engine(bench, *((40, 6) if self._options.tiny else (400, 32)))
        detail["attention"] = bench.backend.name
        if detail["wrong"]:
            raise Failed(f"beyond the bound: {', '.join(detail['wrong'])}")

    def graphs(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """Capture, no hidden waits, and the engine again: out of graphs."""
        bench = self._ready()
        # What earlier stages have freed and this process still holds goes back with the first capture at the latest.
        self._device.synchronize()
        self._device.reset_peak()
        before, _ = self._device.free_bytes()
        seconds = bench.runner.warm_up()
        after, _ = self._device.free_bytes()
        detail |= {"sizes": len(bench.runner.buckets), "seconds_to_capture": round(seconds, 2)}
        detail["mib"] = (before - after) >> 20
        launch_without_waiting(bench, min(4, bench.limits.max_num_slots - 1), self._scale.stall_context)
        detail |= check_engine(bench, *((40, 6) if self._options.tiny else (200, 16)))
        if detail["wrong"]:
            raise Failed(f"beyond the bound: {', '.join(detail['wrong'])}")
        if self._has_bars and seconds > MAX_CAPTURE_S:
            raise Failed(f"captures took {seconds:.1f} s; at most {MAX_CAPTURE_S:g}")

    def deterministic(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """The engine of --deterministic: near the dense model, and one request's bits in every batch."""
        if not (probe := InvariantTritonAttention().probe(spec_of(self._scale, self._device))).is_available:
            raise Skipped(probe.detail)
        detail |= check_invariance(self._ready(), *((9, 1, 1) if self._options.tiny else (1500, 16, 8)))
        if detail["wrong"]:
            raise Failed(f"not the same to the bit: {', '.join(detail['wrong'])}")

    def decode(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """Decode batches against the bytes they must read."""
        lines = detail["cases"] = []
        for line, measured in decode_speed(self._captured(), deadline.is_over):
            lines.append(line)
            self._measured.append(measured)
        bar_case = "x".join(map(str, self._scale.bar_case))
        bar = next((line["to_floor"] for line in lines if line["case"] == bar_case), None)
        if self._has_bars and (bar is None or bar > MAX_TO_FLOOR):
            raise Failed(f"{bar_case} took {bar} times the floor; at most {MAX_TO_FLOOR}")

    def prefill(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """Lone chunks against the operations they must do."""
        lines = detail["cases"] = []
        for line, measured in prefill_speed(self._captured(), deadline.is_over):
            lines.append(line)
            self._measured.append(measured)
        bar = next((line["mfu"] for line in lines if line["case"] == MFU_CASE), None)
        if self._has_bars and (bar is None or bar < LEAST_MFU):
            raise Failed(f"{MFU_CASE} reached {bar} of the peak; at least {LEAST_MFU}")

    def hybrid(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """Decodes beside a chunk, attention in two calls and in one."""
        bench = self._captured()
        other = next(
            (backend for backend in cuda_backends(is_split=False) if backend.name == bench.backend.name), bench.backend
        )
        lines = detail["cases"] = []
        for line, measured in hybrid_speed(bench, bench.runner_of(other), deadline.is_over):
            lines.append(line)
            self._measured.append(measured)

    def stall(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """The scheduler's own core: streams decode, a long prompt arrives."""
        bench = self._captured()
        target_ms = self._options.tbt_target_ms
        detail["tbt_target_ms"] = target_ms
        card = card_of(bench)
        for contender in CONTENDERS:
            if deadline.is_over():
                detail[contender.name] = "no time left"
                continue
            detail[contender.name] = StallTest(bench, card, contender, target_ms).run()
        most = detail["derived"]["max_gap_ms"]
        if self._has_bars and most > target_ms * STALL_SLACK:
            raise Failed(f"the largest gap was {most} ms; the target is {target_ms:g} ms")

    def host(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """How long the device waits for the host between iterations."""
        num_rows = min(64, self._scale.max_num_slots)
        detail |= host_gaps(self._captured(), num_rows, self._scale.stall_context, 20 if self._options.tiny else 200)
        if self._has_bars and detail["one_ahead_ms"] > MAX_HOST_GAP_MS:
            raise Failed(f"{detail['one_ahead_ms']} ms between iterations; at most {MAX_HOST_GAP_MS}")

    def fit(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """The cost model's error on what was measured, before and after it has learnt from it."""
        if not self._measured:
            raise Skipped("nothing was measured")
        roofline = Roofline(self._ready().shape, DEVICES[kind_of(self._device.name)])
        rows = [(roofline.terms(measured.load), measured.ns) for measured in self._measured]
        fit = Fit()
        detail["prior_error"] = round(_mean_error(fit, rows), 3)
        for _ in range(FIT_ROUNDS):
            for terms, ns in rows:
                fit.learn(terms, ns)
        detail |= {"fitted_error": round(_mean_error(fit, rows), 3), "num_rows": len(rows)}
        detail["factors"] = [round(factor, 2) for factor in fit.factors]
        if self._has_bars and detail["fitted_error"] > FITTED_ERROR:
            raise Failed(f"off by {detail['fitted_error']:.1%} after learning; at most {FITTED_ERROR:.0%}")

    def ranks(self, deadline: Deadline, detail: dict[str, Any]) -> None:
        """What ranks do together, and a small model over as many devices as there are."""
        wrong = [f"collectives of one rank, {case}" for case in check_collectives(self._device)]
        detail["collectives"] = "ok" if not wrong else "wrong"
        most = num_devices(self._options.device)
        for tp, pp in RANKS:
            name = f"tp {tp}, pp {pp}"
            if tp * pp > most:
                detail[name] = f"skipped: there are {most} devices"
                continue
            if deadline.is_over():
                detail[name] = "no time left"
                continue
            try:
                detail[name] = found = check_ranks(self._options.device, tp, pp)
            except RankFailed as failed:
                raise Failed(f"{name}: {failed}") from None
            if found["agreeing"] != found["tokens"]:
                wrong.append(name)
        if wrong:
            raise Failed(f"not what one rank gives: {', '.join(wrong)}")

    def _ready(self) -> Bench:
        """Return the model on the device; the first call draws it."""
        if self._bench is None:
            needed, (free, _) = bytes_needed(self._scale), self._device.free_bytes()
            if not self._options.tiny and needed > free:
                raise Failed(f"the check takes {needed / 2**30:.0f} GiB of GPU memory; {free / 2**30:.0f} are free")
            name = self._options.attention_backend
            found = candidates(spec_of(self._scale, self._device))
            named = [each for each in found if each.backend.name == name]
            if name != "auto" and not (named and named[0].is_available):
                raise Failed(f"attention back end {name!r}: {named[0].detail if named else 'unknown'}")
            backend = named[0].backend if named else preferred(found, self._device)
            self._bench = build_bench(self._device, self._scale, backend)
        return self._bench

    def _captured(self) -> Bench:
        """Return the model, with graphs."""
        bench = self._ready()
        if not bench.runner.buckets:
            bench.runner.warm_up()
        return bench


def _mean_error(fit: Fit, rows: list[tuple[Any, float]]) -> float:
    return sum(abs(fit.predict_ns(terms) / ns - 1) for terms, ns in rows) / len(rows)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
