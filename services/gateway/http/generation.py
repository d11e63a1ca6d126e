"""/v1/completions and /v1/chat/completions: from a checked body to an answer, whole or as a stream."""

import asyncio
import secrets
import time
from functools import partial

import structlog
from aiohttp import web
from aiohttp.http import HttpVersion11, StreamWriter

from common.clock import NS_PER_MS, monotonic_ns, ms
from common.ids import RequestId
from common.messages import Submit
from common.messages.logprobs import TokenLogprob
from common.messages.requests import ChatPrompt, Choice, IdsPrompt, TextPrompt
from services.gateway.api.answers import (
    AssistantMessage,
    ChatAnswer,
    ChatChoice,
    CompletionAnswer,
    CompletionChoice,
    Usage,
)
from services.gateway.api.chat import parse_chat
from services.gateway.api.completions import check_vocabulary, parse_completion
from services.gateway.api.generation import GenerationBody
from services.gateway.api.logprobs import chat_logprobs, completion_logprobs
from services.gateway.calls import NO_TARGET_NS, Call, Stream
from services.gateway.config import GatewayConfig
from services.gateway.errors import ApiError
from services.gateway.http.direct import DirectPath
from services.gateway.http.exchange import Exchange, SlowClient, bound_send_buffers, mark_sent, send
from services.gateway.http.gateway import Gateway
from services.gateway.http.middleware import REQUEST_ID, TRACE_RESPONSE, common_headers
from services.gateway.http.spans import CallSpans
from services.gateway.sse import FINISH_WORDS, HEADERS, EventWriter, usage_of
from services.gateway.trace_context import TraceContext, trace_context_of

log = structlog.get_logger()

MAX_KEPT_STALLS = 128
"""Of a traced call, what its spans tell of; as many events as OpenTelemetry keeps in one span."""
CLIENT_GONE = 499
"""What logs and metrics call a client that left before its answer (nginx's number)."""


class GenerationRoutes:
    """The two handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._config = gateway.config

    async def completions(self, request: web.Request) -> web.StreamResponse:
        arrived_ns = monotonic_ns()
        parse = partial(parse_completion, max_choices=self._config.max_choices, max_prompts=self._config.max_prompts)
        body = await self._gateway.read(request, parse)
        vocab_size = self._check_ids(body)
        prompts = body.prompts(vocab_size)
        return await self._generate(request, body, prompts, is_chat=False, arrived_ns=arrived_ns)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        arrived_ns = monotonic_ns()
        body = await self._gateway.read(request, partial(parse_chat, max_choices=self._config.max_choices))
        self._check_ids(body)
        return await self._generate(request, body, (body.prompt(),), is_chat=True, arrived_ns=arrived_ns)

    def _check_ids(self, body: GenerationBody) -> int:
        """Check token ids of the parameters; return the size of the model's vocabulary.

        Raises:
            ApiError: 404 if there is no such model; 400 if an id is outside its vocabulary.
        """
        vocab_size = self._gateway.ring.card(body.model).model.vocab_size
        check_vocabulary(max(body.stop_token_ids or (-1,)), vocab_size, "stop_token_ids")
        check_vocabulary(body.max_biased_id, vocab_size, "logit_bias")
        return vocab_size

    async def _generate(
        self,
        request: web.Request,
        body: GenerationBody,
        prompts: tuple[TextPrompt | IdsPrompt | ChatPrompt, ...],
        *,
        is_chat: bool,
        arrived_ns: int,
    ) -> web.StreamResponse:
        self._gateway.check_room(len(prompts) * body.num_choices)
        trace, spans = trace_context_of(request.headers), None
        if self._gateway.tracing is not None:
            spans = CallSpans(self._gateway.tracing, request.path, trace, arrived_ns)
            trace = spans.trace
        request[TRACE_RESPONSE] = trace.traceparent
        call_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        call = Call(
            call_id,
            submits_of(body, prompts, call_id, trace, self._config),
            arrived_ns=arrived_ns,
            max_unsent_bytes=self._config.max_unsent_bytes if body.stream else None,
            tbt_target_ns=self._tbt_target_ns(body) if body.stream else NO_TARGET_NS,
        )
        if spans is not None and spans.is_recording:
            spans.describe(call, body, is_chat=is_chat)
            call.max_kept_stalls = MAX_KEPT_STALLS
        exchange = Exchange(
            call,
            request,
            heartbeat_s=self._config.heartbeat_s,
            silence_timeout_s=self._config.silence_timeout_s,
        )
        self._gateway.add(exchange)
        status = CLIENT_GONE
        try:
            self._gateway.ring.submit(call)
            await exchange.wait_until_queued(self._config.queue_timeout_s, self._config.retry_after_s)
            if call.failure is not None:
                raise call.failure
            exchange.start_timer(self._gateway.on_silence)
            status = 200  # Of a stream the status is decided here; of a whole answer, when it is there.
            if body.stream:
                return await self._stream(request, exchange, body, is_chat=is_chat)
            return await self._answer_whole(exchange, body, is_chat=is_chat)
        except ApiError as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            status = CLIENT_GONE
            raise
        finally:
            exchange.stop_timer()
            reasons = [reason_of(stream, exchange, status) for stream in call.streams]
            self._gateway.remove(exchange)
            if spans is not None:
                spans.end(call, status, reasons)
            for stream, reason in zip(call.streams, reasons, strict=True):
                log_end(stream, reason, status, request[REQUEST_ID], trace)

    def _tbt_target_ns(self, body: GenerationBody) -> int:
        """The gap above which a stream of this call stalls: the call's own target, or the pool's."""
        target_ms = self._config.stall_above_ms or tbt_target_ms_of(body, self._config)
        if target_ms is None:
            target_ms = self._gateway.ring.card(body.model).tbt_target_ms
        return int(target_ms * NS_PER_MS)

    async def _stream(
        self, request: web.Request, exchange: Exchange, body: GenerationBody, *, is_chat: bool
    ) -> web.StreamResponse:
        call = exchange.call
        events = EventWriter(
            call,
            model=body.model,
            created=int(time.time()),
            is_chat=is_chat,
            includes_usage=body.includes_usage,
            has_continuous_usage=body.has_continuous_usage,
        )
        response = web.StreamResponse(headers={**HEADERS, **common_headers(request)})
        if request.version < HttpVersion11:
            response.force_close()  # Without chunks, only the connection's end tells the answer's.
        bound_send_buffers(request)
        writer = await response.prepare(request)
        assert isinstance(writer, StreamWriter), "an SSE answer has a body"
        writer.send_headers()  # At once: the client learns that it is queued.
        direct = DirectPath(request, writer, exchange, events, self._gateway.metrics, self._gateway.stalls)
        try:
            while True:
                is_last = call.is_over
                fresh = call.take_fresh()
                if data := events.render(fresh) or exchange.take_heartbeat():
                    await send(request, writer, data, self._config.send_timeout_s, call)
                    exchange.sent(monotonic_ns())
                mark_sent(call, fresh, self._gateway.metrics, self._gateway.stalls, monotonic_ns())
                if is_last:
                    break
                # While a full connection held this loop up, more may have come.
                if not (call.fresh or call.is_over):
                    await exchange.wait(direct.try_send)
            async with asyncio.timeout(self._config.send_timeout_s):
                await response.write_eof()
        except (SlowClient, TimeoutError) as error:
            exchange.cut()
            raise ConnectionResetError("the client does not read") from error
        finally:
            if exchange.is_cut:
                self._gateway.metrics.client_cut()
        return response

    async def _answer_whole(self, exchange: Exchange, body: GenerationBody, *, is_chat: bool) -> web.Response:
        call = exchange.call
        texts: list[list[str]] = [[] for _ in call.streams]
        logprobs: list[list[TokenLogprob]] = [[] for _ in call.streams]
        while True:
            fresh = call.take_fresh()
            for stream in fresh:
                texts[stream.index].append(stream.take_text())
                logprobs[stream.index] += stream.take_logprobs()
            mark_sent(call, fresh, self._gateway.metrics, self._gateway.stalls, monotonic_ns())
            if call.is_over:
                break
            await exchange.wait()
        if call.failure is not None:
            raise call.failure
        answer = whole_answer(call, ["".join(parts) for parts in texts], logprobs, body.model, is_chat=is_chat)
        return web.Response(body=answer.model_dump_json().encode(), content_type="application/json")


def submits_of(
    body: GenerationBody,
    prompts: tuple[TextPrompt | IdsPrompt | ChatPrompt, ...],
    call_id: str,
    trace: TraceContext,
    config: GatewayConfig,
) -> tuple[Submit, ...]:
    """One Submit a prompt. Choice indices go on from prompt to prompt; seeds start anew with each, so that a prompt in
    a list gives what it gives alone."""
    slo = body.slo
    submits = []
    for prompt_index, prompt in enumerate(prompts):
        seed = body.seed if body.seed is not None else secrets.randbits(64)
        choices = tuple(
            Choice(
                request_id=RequestId(f"{call_id}-{prompt_index * body.num_choices + choice}"),
                seed=wrapped_seed(seed + choice),
            )
            for choice in range(body.num_choices)
        )
        submits.append(
            Submit(
                attempt=1,
                model=body.model,
                prompt=prompt,
                choices=choices,
                sampling=body.sampling(),
                max_tokens=body.bounded_tokens,
                stop=tuple(body.stop or ()),
                has_echo=body.has_echo,
                priority=body.priority or 0,
                tbt_target_ms=tbt_target_ms_of(body, config),
                ttft_target_ms=None if slo is None else slo.ttft_ms,
                deadline_ms=body.deadline_ms,
                cache_salt=body.cache_salt or "",
                traceparent=trace.traceparent,
                tracestate=trace.tracestate,
            )
        )
    return tuple(submits)


def tbt_target_ms_of(body: GenerationBody, config: GatewayConfig) -> float | None:
    """The target that a body asks for, by itself or by its class; None leaves it to the pool."""
    slo = body.slo
    if slo is None or slo.tbt_ms is not None:
        return None if slo is None else slo.tbt_ms
    of_class = {"interactive": config.interactive_tbt_ms, "batch": config.batch_tbt_ms}
    return of_class.get(slo.class_ or "standard")


def wrapped_seed(seed: int) -> int:
    """Return seed as the int64 with its low 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


def whole_answer(
    call: Call, texts: list[str], logprobs: list[list[TokenLogprob]], model: str, *, is_chat: bool
) -> ChatAnswer | CompletionAnswer:
    """The answer of a call that is over and did not fail; texts and scored tokens are by stream."""
    usage = Usage.model_validate(usage_of(call.counts()))
    created = int(time.time())
    ended = [(stream.index, texts[stream.index], stream.ended) for stream in call.streams]
    words = [(index, text, FINISH_WORDS[end.reason]) for index, text, end in ended if end is not None]
    if is_chat:
        chat_choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=text),
                logprobs=chat_logprobs(logprobs[index]) if logprobs[index] else None,
                finish_reason=word,
            )
            for index, text, word in words
        ]
        return ChatAnswer(id=call.call_id, created=created, model=model, choices=chat_choices, usage=usage)
    choices = [
        CompletionChoice(
            index=index,
            text=text,
            logprobs=completion_logprobs(logprobs[index]) if logprobs[index] else None,
            finish_reason=word,
        )
        for index, text, word in words
    ]
    return CompletionAnswer(id=call.call_id, created=created, model=model, choices=choices, usage=usage)


def reason_of(stream: Stream, exchange: Exchange, status: int) -> str:
    """Why the stream ended, in one word."""
    if exchange.is_cut:
        return "slow_client"
    if stream.ended is not None:
        return str(stream.ended.reason)
    if exchange.call.failure is not None:
        return exchange.call.failure.code or "refused"
    return "client_gone" if status in (CLIENT_GONE, 200) else "not_placed"


def log_end(stream: Stream, reason: str, status: int, http_request_id: str, trace: TraceContext) -> None:
    """The one line of a request."""
    has_token = stream.first_token_ns > 0
    log.info(
        "request_finished",
        request_id=stream.request_id,
        http_request_id=http_request_id,
        trace_id=trace.trace_id,
        status=status,
        reason=reason,
        attempt=stream.attempt,
        ttft_ms=round(ms(stream.first_token_ns - stream.call.arrived_ns), 3) if has_token else None,
        tbt_max_ms=round(ms(stream.tbt_max_ns), 3) if has_token else None,
        num_stalls=stream.num_stalls,
        num_prompt_tokens=stream.num_prompt_tokens,
        num_output_tokens=stream.num_output_tokens,
        num_cached_tokens=stream.ended.num_cached_tokens if stream.ended else 0,
        num_preemptions=stream.ended.num_preemptions if stream.ended else 0,
    )
