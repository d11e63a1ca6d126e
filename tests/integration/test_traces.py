"""One request's trace, as a collector sees it: four real processes, a stall, and who caused it."""

import concurrent.futures
import secrets
import time
from collections.abc import Iterator

import pytest
import requests

from tests.gpu_worker.hf import smollm2_or_skip
from tests.integration.collector import Collector, Event, Span, collecting
from tests.integration.system import HTTP_TIMEOUT_S, System, running, wait_until

pytest.importorskip("opentelemetry.sdk")

SETTLE_S = 30.0
SECRET_WORD = "zanzibar"
"""Of the prompt: in no span."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as started:
        yield started


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[System]:
    """Prompts run before streams, so that one long enough makes the others stall."""
    smollm2_or_skip()
    flags = ("--device", "simulated", "--profile", "a100-llama2-70b-tp4", "--policy", "prefill_first")
    environ = {"LEGATO_ITERATION_TRACE_SHARE": "0", "LEGATO_PREFIX_CACHE": "false"}
    with running(*flags, "--tbt-target-ms", "150", "--otlp-endpoint", collector.url, environ=environ) as system:
        yield system


def traceparent(*, is_sampled: bool = True) -> str:
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-0{int(is_sampled)}"


def post(system: System, parent: str, prompt: str, **parameters: object) -> requests.Response:
    body = {"model": "smollm2", "prompt": prompt, "ignore_eos": True, **parameters}
    headers = {"traceparent": parent, "tracestate": "vendor=1"} if parent else {}
    response = requests.post(
        f"{system.url}/v1/completions", json=body, headers=headers, timeout=HTTP_TIMEOUT_S, stream=True
    )
    assert response.status_code == 200, response.text
    return response


def wait_for_span(name: str, trace_id: str, collector: Collector) -> None:
    wait_until(lambda: name in collector.of_trace(trace_id), SETTLE_S, f"{name} of {trace_id}")


def iterations_of(trace_id: str, collector: Collector) -> list[int]:
    spans = collector.of_trace(trace_id).get("iteration", [])
    return [span.attributes["legato.iteration.number"] for span in spans]


def wait_for_iteration_of(stall: Event, trace_id: str, collector: Collector) -> None:
    """It was kept though none are sampled."""
    number = stall.attributes["legato.iteration.number"]
    wait_until(lambda: number in iterations_of(trace_id, collector), SETTLE_S, f"iteration {number} of {trace_id}")


def test_a_trace_tells_which_request_made_a_stream_stall(traced: System, collector: Collector) -> None:
    parent, culprit_parent = traceparent(), traceparent()
    trace_id, culprit_trace_id = parent.split("-")[1], culprit_parent.split("-")[1]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        response = post(traced, parent, SECRET_WORD, max_tokens=200, stream=True)
        lines = response.iter_lines(chunk_size=1)
        next(lines)
        next(lines)
        reading = pool.submit(post, traced, culprit_parent, f"{SECRET_WORD} " * 700, max_tokens=1)
        for _ in lines:
            pass
        reading.result()
    wanted = {"POST /v1/completions", "tokenize", "queue", "prefill", "decode", "iteration"}
    wait_until(lambda: wanted <= collector.of_trace(trace_id).keys(), SETTLE_S, f"{wanted} of {trace_id}")
    of_culprit = {"POST /v1/completions", "decode"}
    wait_until(lambda: of_culprit <= collector.of_trace(culprit_trace_id).keys(), SETTLE_S, "the culprit's spans")

    spans = collector.of_trace(trace_id)
    (server,) = spans["POST /v1/completions"]
    assert (server.service, server.kind, server.parent_id) == ("legato-gateway", 2, parent.split("-")[2])
    assert response.headers["traceresponse"] == f"00-{trace_id}-{server.span_id}-01"
    assert server.attributes["gen_ai.usage.output_tokens"] == 200
    assert server.attributes["http.response.status_code"] == 200
    services = {name: {span.service for span in of_name} for name, of_name in spans.items() if name != server.name}
    assert services == {
        "tokenize": {"legato-tokenizer"},
        "queue": {"legato-scheduler"},
        "prefill": {"legato-scheduler"},
        "decode": {"legato-gateway"},
        "iteration": {"legato-worker"},
    }
    for below in (span for of_name in spans.values() for span in of_name if span is not server):
        assert below.parent_id == server.span_id
        assert below.began_ns <= below.ended_ns
    (prefill,) = spans["prefill"]
    assert [event.name for event in prefill.events] == ["chunk"]

    (decode,) = spans["decode"]
    (stall,) = [event for event in decode.events if event.attributes["legato.stall.cause"] == "prefill_interference"]
    assert stall.name == "stall"
    assert decode.began_ns < stall.at_ns <= decode.ended_ns
    parts = {key: value for key, value in stall.attributes.items() if key.startswith("legato.stall.part.")}
    assert sum(parts.values()) == pytest.approx(stall.attributes["legato.stall.gap_ms"])
    assert stall.attributes["legato.stall.gap_ms"] > stall.attributes["legato.stall.target_ms"] == 150

    (culprit,) = collector.of_trace(culprit_trace_id)["POST /v1/completions"]
    assert (culprit_trace_id, culprit.span_id) in decode.linked
    (culprit_id,) = stall.attributes["legato.stall.culprits"]
    assert culprit_id.startswith(culprit.attributes["gen_ai.response.id"])
    wait_for_iteration_of(stall, trace_id, collector)
    assert SECRET_WORD.encode() not in b"".join(collector.bodies)
    assert decode.attributes["legato.tbt_target_ms"] == 150
    (unwatched,) = collector.of_trace(culprit_trace_id)["decode"]
    assert "legato.stalls" in unwatched.attributes, "though nobody watched"
    assert not {"legato.tbt_target_ms", "legato.tbt_max_ms"} & unwatched.attributes.keys()
    # Stores that nest names at their dots have no place for a name that is the beginning of another.
    names = {
        name
        for span in (span for of_name in spans.values() for span in of_name)
        for attributes in (span.attributes, *(event.attributes for event in span.events))
        for name in attributes
    }
    namespaces = {name[:index] for name in names for index, letter in enumerate(name) if letter == "."}
    assert not names & namespaces


def test_each_of_the_streams_that_one_prompt_made_stall_has_the_iterations_of_its_gap(
    traced: System, collector: Collector
) -> None:
    parents = [traceparent(), traceparent()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        streams = [post(traced, parent, "Hello", max_tokens=200, stream=True).iter_lines(1) for parent in parents]
        for lines in streams:
            next(lines)
            next(lines)
        readings = [pool.submit(list, lines) for lines in streams]
        post(traced, "", "Hello " * 1500, max_tokens=1)  # By itself far above the target.
        for reading in readings:
            reading.result()

    for trace_id in (parent.split("-")[1] for parent in parents):
        wait_for_span("decode", trace_id, collector)
        (decode,) = collector.of_trace(trace_id)["decode"]
        interference = "legato.stall.part.prefill_interference_ms"
        stall = max(decode.events, key=lambda event: event.attributes.get(interference, 0.0))
        assert stall.attributes["legato.stall.cause"] == "prefill_interference"
        wait_for_iteration_of(stall, trace_id, collector)
        numbers = iterations_of(trace_id, collector)
        assert len(numbers) == len(set(numbers)), "each of them once"


def test_a_caller_that_does_not_sample_gets_no_spans(traced: System, collector: Collector) -> None:
    silent, sampled = traceparent(is_sampled=False), traceparent()
    answer = post(traced, silent, "Hello", max_tokens=2)
    assert answer.headers["traceresponse"].startswith(f"00-{silent.split('-')[1]}-")
    assert answer.headers["traceresponse"].endswith("-00")
    post(traced, sampled, "Hello", max_tokens=2)
    wait_until(lambda: "decode" in collector.of_trace(sampled.split("-")[1]), SETTLE_S, "the other request's spans")
    assert collector.of_trace(silent.split("-")[1]) == {}


def test_a_call_without_a_trace_begins_one(traced: System, collector: Collector) -> None:
    answer = post(traced, "", "Hello", max_tokens=2)
    trace_id = answer.headers["traceresponse"].split("-")[1]

    def server_span() -> list[Span]:
        return collector.of_trace(trace_id).get("POST /v1/completions", [])

    wait_until(lambda: len(server_span()) == 1, SETTLE_S, "the server span")
    assert server_span()[0].parent_id == ""
    assert traced.metric("gateway", "legato_spans_dropped_total") == 0


def test_a_collector_that_takes_nothing_holds_up_nobody() -> None:
    """Nothing listens there. Streams run, the process ends in time, and what was lost is counted."""
    smollm2_or_skip()
    flags = ("--device", "simulated", "--profile", "h200-smollm2", "--otlp-endpoint", "http://127.0.0.1:9")
    with running(*flags) as system:
        post(system, traceparent(), "Hello", max_tokens=8)
        wait_until(
            lambda: system.metric("gateway", "legato_spans_dropped_total") >= 2, SETTLE_S, "lost spans to be counted"
        )
        began = time.monotonic()
        assert post(system, traceparent(), "Hello", max_tokens=8).status_code == 200
        assert time.monotonic() - began < SETTLE_S
