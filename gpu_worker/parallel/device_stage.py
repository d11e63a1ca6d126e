"""A rank on a device of its own: iterations are launched one ahead, and tokens go from device to device."""

from collections.abc import Callable, Sequence

from common.messages.ranks import StageDone
from gpu_worker.cuda.pipeline import Pipeline
from gpu_worker.cuda.results import Computed
from gpu_worker.cuda.runner import CudaRunner
from gpu_worker.parallel.layout import Layout
from gpu_worker.parallel.stage import Report
from gpu_worker.slots import Row


class DeviceStage:
    """A gpu_worker.parallel.stage.Stage."""

    def __init__(self, layout: Layout, runner: CudaRunner, on_failed: Callable[[BaseException], None]) -> None:
        """on_failed is called in another thread, once, with what waiting for the device raised."""
        self._samples = layout.samples
        self._pipeline = Pipeline(runner, on_failed)

    def run(self, rows: Sequence[Row], report: Report) -> None:
        slots = tuple(row.resident.slot for row in rows if row.is_sampled) if self._samples else ()

        def done(computed: Computed, finished_ns: int) -> None:
            report(
                StageDone(
                    busy_ns=computed.device_ns,
                    bubble_ns=computed.bubble_ns,
                    slots=slots,
                    token_ids=tuple(computed.token_ids),
                    sampled_scores=tuple(computed.sampled_scores),
                    prompt_scores=tuple(computed.prompt_scores),
                )
            )

        self._pipeline.run(tuple(rows), done)

    def take_back(self, token_ids: Sequence[int]) -> None:
        pass  # The first stage's devices have them already, or will.

    def interrupt(self) -> None:
        pass  # A device that waits for another ends with its process.

    def close(self) -> None:
        self._pipeline.close()
