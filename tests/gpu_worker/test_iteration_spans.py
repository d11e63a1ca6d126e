"""Which iterations have a span, and in whose trace."""

import random

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.messages.plans import IterationDone, KeptIteration, Plan
from common.tracing import Tracing
from gpu_worker.iteration_spans import MAX_REMEMBERED, IterationSpans

TRACE_IDS = [17, 18]
PARENTS = [f"00-{trace_id:032x}-{5:016x}-01" for trace_id in TRACE_IDS]


class World:
    """A worker's iterations so far, and what became of them."""

    def __init__(self, share: float) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = IterationSpans(Tracing(provider.get_tracer("test")), share, random.Random(0))

    def finish(self, num_iterations: int) -> None:
        for iteration in range(num_iterations):
            self.spans.finish(
                IterationDone(
                    epoch=1,
                    iteration=iteration,
                    slots=(),
                    token_ids=(),
                    received_ns=1,
                    started_ns=2,
                    finished_ns=3,
                    device_ns=1,
                )
            )

    def keep(self, iteration: int, *parents: str) -> None:
        kept = tuple(KeptIteration(1, iteration, parent) for parent in parents)
        self.spans.keep(Plan(epoch=1, iteration=1000, kept=kept))

    def written(self) -> list[tuple[int, object]]:
        """Trace id and number of each span."""
        spans = self.exporter.get_finished_spans()
        return [(span.context.trace_id, (span.attributes or {})["legato.iteration.number"]) for span in spans]


def test_an_iteration_has_a_span_in_the_trace_of_every_stream_that_it_made_late() -> None:
    world = World(share=0)
    world.finish(4)
    assert world.written() == []
    world.keep(2, *PARENTS)
    assert world.written() == [(TRACE_IDS[0], 2), (TRACE_IDS[1], 2)]


def test_one_that_was_sampled_before_can_still_be_kept() -> None:
    world = World(share=1)
    world.finish(1)
    world.keep(0, PARENTS[0])
    (sampled, number), kept = world.written()
    assert number == 0
    assert sampled not in TRACE_IDS
    assert kept == (TRACE_IDS[0], 0)


def test_the_oldest_are_forgotten() -> None:
    world = World(share=0)
    world.finish(MAX_REMEMBERED + 1)
    world.keep(0, PARENTS[0])
    world.keep(1, PARENTS[0])
    assert world.written() == [(TRACE_IDS[0], 1)]
