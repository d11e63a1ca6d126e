"""A device to simulate, from a recording: `python -m loadtest.simulate.recorded FILE --out DEVICE.json`.

The fit that a scheduler saves follows its device through the last minutes. This one weighs all iterations of a
recording alike, and keeps how they scatter about it, one after the other, so that simulated iterations scatter in the
same way.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.cost.fit import MAX_RATIO, NOISE, OUTLIER, PRIOR_SD, SD_OF_ERROR, Fit, SavedFit
from common.cost.roofline import Terms
from common.messages import IterationDone
from common.messages.cards import WorkerCard
from loadtest.simulate.setup import MAX_SCATTER, SavedDevice
from services.scheduler.events import WorkerReported
from services.scheduler.recording.files import segments_of
from services.scheduler.recording.segment import BadRecording, Segment, event_of

ROUNDS = 20
"""Of reweighting, each a least-squares solution; a handful is enough, and all is done in milliseconds."""
LEAST_ITERATIONS = 200
"""Below it a recording says too little of a device."""


def measurements(segment: Segment) -> Iterator[tuple[WorkerCard, Terms, int]]:
    """Run a segment again; of each iteration that returned: its worker's card, its terms, and its nanoseconds.

    Raises:
        BadRecording: If this code cannot read it.
    """
    core = segment.core()
    for step in segment.steps():
        event = event_of(step)
        if isinstance(event, WorkerReported) and isinstance(event.report, IterationDone):
            worker = next((each for each in core.workers if each.worker_id == event.worker_id), None)
            done = event.report
            if worker is not None and worker.in_flight:
                flight = worker.in_flight[0]
                if (flight.plan.epoch, flight.plan.iteration) == (done.epoch, done.iteration):
                    yield worker.card, flight.terms, worker.took_ns(done)
        core.step(event, step.now_ns)


def fit_all(terms: NDArray[np.float64], measured_ns: NDArray[np.float64]) -> tuple[SavedFit, NDArray[np.float64]]:
    """Robust ridge regression on relative errors: factors near 1 unless the iterations show otherwise.

    Args:
        terms: A row for each iteration, as common.cost.roofline has them.
        measured_ns: How long each took.

    Returns:
        The fit, and each iteration's time over the fitted one, of those that are no outliers by MAX_RATIO.
    """
    prior_sd = np.array(PRIOR_SD)
    factors: NDArray[np.float64] = np.ones(terms.shape[1])
    noise = SD_OF_ERROR * Fit().error
    information: NDArray[np.float64] = np.diag(1 / prior_sd**2)
    for _ in range(ROUNDS):
        predicted_ns = np.maximum(terms @ factors, 1.0)
        ratio = measured_ns / predicted_ns
        kept = (ratio > 1 / MAX_RATIO) & (ratio < MAX_RATIO)
        weights = np.where(kept, np.minimum(1.0, OUTLIER * noise / np.maximum(np.abs(ratio - 1), 1e-9)), 0.0) / noise**2
        inputs = terms / predicted_ns[:, None]
        information = inputs.T @ (inputs * weights[:, None]) + np.diag(1 / prior_sd**2)
        solved = np.linalg.solve(information, inputs.T @ (weights * ratio) + 1 / prior_sd**2)
        factors = np.maximum(solved, 0.0).astype(np.float64)
        noise = max(NOISE, SD_OF_ERROR * float(np.mean(np.abs(ratio[kept] - 1))))
    ratio = (measured_ns / np.maximum(terms @ factors, 1.0))[kept]
    saved = SavedFit(
        factors=tuple(map(float, factors)),
        covariance=tuple(tuple(map(float, row)) for row in np.linalg.inv(information)),
        error=float(np.mean(np.abs(ratio - 1))),
        num_measured=len(ratio),
    )
    return saved, ratio


def device_of(path: Path) -> SavedDevice:
    """The device of a recording: one file, or a folder of them.

    Raises:
        BadRecording: If it cannot be read, is of several kinds of worker, or holds fewer than LEAST_ITERATIONS.
    """
    found = [measured for file in segments_of(path) for measured in measurements(Segment(file))]
    if len(found) < LEAST_ITERATIONS:
        raise BadRecording(f"{path}: {len(found)} iterations are too few; {LEAST_ITERATIONS} at least")
    card = found[0][0]
    if any((each.device_kind, each.shape) != (card.device_kind, card.shape) for each, _, _ in found):
        raise BadRecording(f"{path}: of several kinds of workers or models")
    fit, ratio = fit_all(
        np.array([terms for _, terms, _ in found], np.float64),
        np.array([took_ns for _, _, took_ns in found], np.float64),
    )
    return SavedDevice(
        device_kind=card.device_kind,
        tensor_parallel=card.tensor_parallel,
        shape=card.shape,
        fit=fit,
        scatter=tuple(round(float(each), 4) for each in ratio[-MAX_SCATTER:]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Fit; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.simulate.recorded", description=__doc__)
    parser.add_argument("path", type=Path, metavar="FILE", help="a recording of the scheduler, or a folder of them")
    parser.add_argument("--out", type=Path, required=True, help="write the device here, for `legato simulate --device`")
    flags = parser.parse_args(argv)
    try:
        device = device_of(flags.path)
        flags.out.write_bytes(msgspec.json.format(msgspec.json.encode(device)) + b"\n")
    except (BadRecording, OSError) as error:
        print(f"loadtest.simulate.recorded: {error}", file=sys.stderr)
        return 2
    print(f"{device.fit.num_measured} iterations, {device.fit.error:.1%} off on average")
    return 0


if __name__ == "__main__":
    sys.exit(main())
