"""The gateway's spans: one for an HTTP request, and below it one for each of its streams (docs/tracing.md)."""

from opentelemetry.trace import Span, Status, StatusCode

from common.clock import monotonic_ns, ms
from common.tracing import Attribute, Attributes, SpanEvent, Tracing, traceparent_of, wall_ns
from services.gateway.account import Stall
from services.gateway.api.generation import GenerationBody
from services.gateway.calls import NO_TARGET_NS, Call, Stream
from services.gateway.trace_context import TraceContext


class CallSpans:
    """Of one call: its server span from the start, since all others lie below it; the rest when it ends."""

    def __init__(self, tracing: Tracing, route: str, inbound: TraceContext, arrived_ns: int) -> None:
        self._tracing = tracing
        traceparent = "" if inbound.is_fresh else inbound.traceparent
        self._span: Span = tracing.start_server(f"POST {route}", traceparent, inbound.tracestate, arrived_ns)
        self._route = route
        self.trace = TraceContext(traceparent_of(self._span.get_span_context()), inbound.tracestate)
        """What travels on with the call's requests."""

    @property
    def is_recording(self) -> bool:
        """Whether anything will be written."""
        return self._span.is_recording()

    def describe(self, call: Call, body: GenerationBody, *, is_chat: bool) -> None:
        """Say what was asked for. Never the prompt."""
        if not self.is_recording:
            return
        submit = call.submits[0]
        asked: dict[str, str | int | float | bool | None] = {
            "http.request.method": "POST",
            "http.route": self._route,
            "url.path": self._route,
            "gen_ai.operation.name": "chat" if is_chat else "text_completion",
            "gen_ai.provider.name": "legato",
            "gen_ai.request.model": submit.model,
            "gen_ai.request.max_tokens": submit.max_tokens,
            "gen_ai.request.choice.count": body.num_choices,
            "gen_ai.request.seed": body.seed,
            "gen_ai.request.temperature": submit.sampling.temperature,
            "gen_ai.request.top_p": submit.sampling.top_p,
            "gen_ai.request.top_k": submit.sampling.top_k,
            "gen_ai.response.id": call.call_id,
            "gen_ai.response.model": submit.model,
            "legato.stream": bool(body.stream),
            "legato.priority": submit.priority,
        }
        self._span.set_attributes({name: value for name, value in asked.items() if value is not None})

    def end(self, call: Call, status: int, reasons: list[str]) -> None:
        """The call is over, each of its streams for a reason."""
        if not self.is_recording:
            return
        for stream, reason in zip(call.streams, reasons, strict=True):
            if stream.first_token_ns:
                self._write_decode(call, stream, reason)
        counts = call.counts()
        self._span.set_attributes(
            {
                "http.response.status_code": status,
                "gen_ai.response.finish_reasons": reasons,
                "gen_ai.usage.input_tokens": counts.num_prompt_tokens,
                "gen_ai.usage.output_tokens": counts.num_output_tokens,
                "legato.cached_tokens": counts.num_cached_tokens,
                "legato.stalls": sum(stream.num_stalls for stream in call.streams),
            }
        )
        if status >= 500:
            self._span.set_attribute("error.type", reasons[0])
            self._span.set_status(Status(StatusCode.ERROR, reasons[0]))
        self._span.end(wall_ns(monotonic_ns()))

    def _write_decode(self, call: Call, stream: Stream, reason: str) -> None:
        stalls = [stall for stall in call.kept_stalls if stall.request_id == stream.request_id]
        culprits = [culprit for stall in stalls for culprit in stall.account.worker.culprits]
        attributes: dict[str, Attribute] = {
            "legato.request_id": stream.request_id,
            "legato.attempt": stream.attempt,
            "legato.output_tokens": stream.num_output_tokens,
            "legato.finish_reason": reason,
            "legato.ttft_ms": ms(stream.first_token_ns - call.arrived_ns),
            "legato.stalls": stream.num_stalls,
        }
        if call.tbt_target_ns != NO_TARGET_NS:  # Somebody watches, so there are gaps.
            attributes["legato.tbt_target_ms"] = ms(call.tbt_target_ns)
            attributes["legato.tbt_max_ms"] = ms(stream.tbt_max_ns)
        self._tracing.write(
            "decode",
            self.trace.traceparent,
            stream.first_token_ns,
            stream.last_token_ns,
            attributes,
            events=[SpanEvent("stall", stall.at_ns, _attributes_of(stall)) for stall in stalls],
            linked=list(dict.fromkeys(culprit.traceparent for culprit in culprits if culprit.traceparent)),
        )


def _attributes_of(stall: Stall) -> Attributes:
    worker = stall.account.worker
    attributes: dict[str, Attribute] = {
        "legato.stall.cause": stall.cause,
        "legato.stall.gap_ms": ms(stall.gap_ns),
        "legato.stall.target_ms": ms(stall.target_ns),
        **{f"legato.stall.part.{name}_ms": ms(part_ns) for name, part_ns in stall.account.parts().items()},
        "legato.stall.token_index": stall.index,
        "legato.stall.recomputed_tokens": worker.num_recomputed_tokens,
        "legato.stall.culprits": [culprit.request_id for culprit in worker.culprits],
        "legato.stall.culprit_tokens": [culprit.num_tokens for culprit in worker.culprits],
        "legato.stall.culprit_ms": [ms(culprit.ns) for culprit in worker.culprits],
        "legato.worker": stall.stamps.worker_id,
        "legato.iteration.number": stall.stamps.iteration,
    }
    return attributes
