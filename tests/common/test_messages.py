"""Every message survives the wire, and bytes that older programs sent still decode."""

import json
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest

from common.cost.shapes import SHAPES
from common.ids import BlockId, InstanceId, RequestId, Slot, TokenizerId, WorkerId, pack_ids, unpack_ids
from common.messages import (
    AnyMessage,
    Bye,
    CallFailed,
    Cancel,
    Credit,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Hello,
    IterationDone,
    Plan,
    PlanRefused,
    PoolCard,
    RankMeasure,
    RankPlan,
    RankReady,
    RankStart,
    Refused,
    RequestArrived,
    StageDone,
    StopReached,
    StreamBatch,
    Submit,
    TextBatch,
)
from common.messages.cards import ModelCard, ProfilePoint, WorkerCard
from common.messages.gaps import Culprit, WorkerGap
from common.messages.links import Role
from common.messages.logprobs import TokenLogprob, TokenScores, TopLogprob
from common.messages.plans import GrownTable, KeptIteration, NewRequest, PlanChunk, SlotScores
from common.messages.requests import (
    ChatPrompt,
    Choice,
    FinishReason,
    PromptDelta,
    RejectReason,
    RequestEnded,
    RequestQueued,
    RequestRejected,
    Sampling,
    Stamps,
    TextDelta,
    TextPrompt,
)
from common.messages.streams import PromptScored, TokensSampled
from common.wire.codec import MalformedMessage, decode, encode

COMMITTED = Path(__file__).parent / "wire_bytes.json"
"""Messages of protocol 1.0 as hexadecimal bytes. A change here is a change of protocol."""

MODEL = ModelCard(name="m", max_model_len=8192, vocab_size=49152, eos_token_ids=(2,))
STAMPS = Stamps(WorkerId(InstanceId("worker-1")), 7, 1, 2, 3)
REQUEST = RequestId("cmpl-1-0")
SAMPLING = Sampling(temperature=0.5, top_k=3, stop_token_ids=(5,))
SCORES = TokenScores.of([-0.5, -1.5], [7, 9, 8, 0], [-0.25, -2.0, -1.5, -3.0])
ENDED = RequestEnded(
    request_id=REQUEST, attempt=1, reason=FinishReason.STOP, num_prompt_tokens=3, num_output_tokens=2, stop="END"
)
REJECTED = RequestRejected(request_id=REQUEST, attempt=1, reason=RejectReason.INVALID, detail="why", param="prompt")

EXAMPLES: list[AnyMessage] = [
    Hello(
        role=Role.WORKER,
        instance_id=InstanceId("worker-1"),
        window=8,
        worker=WorkerCard(
            model=MODEL,
            shape=msgspec.structs.replace(SHAPES["smollm2"], bytes_per_weight=4, bytes_per_kv=4),
            device="cpu",
            device_kind="cpu",
            dtype="float32",
            attention="cpu",
            is_batch_invariant=False,
            block_size=16,
            num_blocks=64,
            max_num_slots=4,
            max_chunk_tokens=512,
            profile=(ProfilePoint(1, 1000),),
        ),
    ),
    Refused(detail="no"),
    Credit(num_messages=4),
    Bye(detail="stopping"),
    PoolCard(model=MODEL, num_workers=1, kv_capacity=1024, tbt_target_ms=100.0),
    Submit(
        attempt=1,
        model="m",
        prompt=ChatPrompt(({"role": "user", "content": "hé\U0001f469"},)),
        choices=(Choice(REQUEST, -(2**63), b""),),
        sampling=SAMPLING,
        max_tokens=None,
        stop=("END",),
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    Cancel(request_ids=(REQUEST,)),
    Encode(call_id="c", model="m", prompt=TextPrompt("text")),
    Encoded(call_id="c", token_ids=pack_ids([1, 2]), max_model_len=8192),
    Decode(call_id="c", model="m", token_ids=pack_ids([1, 2])),
    Decoded(call_id="c", text="text"),
    CallFailed(call_id="c", reason=RejectReason.UNKNOWN_MODEL, detail="why", param="model"),
    TextBatch(
        queued=(RequestQueued(request_id=REQUEST, attempt=1, num_prompt_tokens=3),),
        deltas=(TextDelta(REQUEST, 1, 4, (17, 18), 20, "text", STAMPS),),
        ended=(ENDED, REJECTED),
    ),
    RequestArrived(
        request_id=REQUEST,
        tokenizer_id=TokenizerId(InstanceId("tokenizer-1")),
        attempt=1,
        token_ids=pack_ids([1, 2, 3]),
        num_prompt_tokens=3,
        max_tokens=16,
        seed=2**63 - 1,
        sampling=SAMPLING,
    ),
    StopReached(request_id=REQUEST, num_output_tokens=2),
    StreamBatch(sampled=(TokensSampled(REQUEST, 1, 0, (17,)),), stamps=STAMPS, ended=(ENDED,)),
    Plan(
        epoch=1,
        iteration=2,
        released=(Slot(3),),
        introduced=(NewRequest(Slot(0), REQUEST, pack_ids([1, 2]), 2, 7, SAMPLING, pack_ids([0])),),
        grown=(GrownTable(Slot(1), (BlockId(5),)),),
        decode_removed=(Slot(2),),
        decode_added=(Slot(1),),
        chunks=(PlanChunk(Slot(0), 0, 2, True),),
    ),
    IterationDone(
        epoch=1, iteration=2, slots=(Slot(1),), token_ids=(9,), received_ns=1, started_ns=2, finished_ns=3, device_ns=1
    ),
    PlanRefused(epoch=1, iteration=2, detail="unknown slot 4"),
    RankReady(settings="tp 2, pp 1"),
    RankStart(store="tcp://10.0.0.1:40000"),
    RankMeasure(num_tokens=8),
    RankPlan(connection=1, plan=Plan(epoch=1, iteration=2)),
    StageDone(busy_ns=3, bubble_ns=1, slots=(Slot(1),), token_ids=(9,)),
]


def test_there_is_an_example_of_every_message() -> None:
    assert {type(example) for example in EXAMPLES} == set(get_args(AnyMessage))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_round_trips(message: AnyMessage) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_bytes_of_protocol_1_0_still_decode(message: AnyMessage) -> None:
    committed = json.loads(COMMITTED.read_text())
    assert decode(bytes.fromhex(committed[type(message).__name__])) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_fields_of_a_newer_minor_version_are_ignored(message: AnyMessage) -> None:
    plain: dict[str, Any] = msgpack.unpackb(encode(message), strict_map_key=True)
    plain["a_field_of_tomorrow"] = [1, {"x": 2}]
    assert decode(msgpack.packb(plain)) == message


def test_what_came_after_protocol_1_0_round_trips_too() -> None:
    gap = WorkerGap(decode_ns=3, device_slow_ns=-1, culprits=(Culprit(REQUEST, 512, 7, "00-1-2-01"),))
    plan = Plan(epoch=1, iteration=2, kept=(KeptIteration(1, 0, "00-1-2-01"),))
    sampled = StreamBatch(sampled=(TokensSampled(REQUEST, 1, 0, (17,), 0, 0),), stamps=STAMPS, gaps=(gap,))
    text = TextBatch(deltas=(TextDelta(REQUEST, 1, 4, (17,), 20, "text", STAMPS, 0),), gaps=(gap,))
    for message in (plan, sampled, text):
        assert decode(encode(message)) == message


def test_trailing_values_of_a_newer_row_are_ignored() -> None:
    plain = msgpack.unpackb(encode(Plan(epoch=0, iteration=0, chunks=(PlanChunk(Slot(0), 0, 2, True),))))
    plain["chunks"][0].append("tomorrow")
    decoded = decode(msgpack.packb(plain))
    assert isinstance(decoded, Plan)
    assert decoded.chunks == (PlanChunk(Slot(0), 0, 2, True),)


ADDED: list[AnyMessage] = [
    TextBatch(
        prompts=(PromptDelta(REQUEST, 1, "Hi", 0, (TokenLogprob(b"Hi", None, 0),)),),
        deltas=(
            TextDelta(
                REQUEST,
                1,
                0,
                (17,),
                0,
                "x",
                STAMPS,
                logprobs=(TokenLogprob(b"\xf0\x9f", -0.5, 2, (TopLogprob(b"x", -1.5),)),),
            ),
        ),
    ),
    StreamBatch(
        scored=(PromptScored(REQUEST, 1, 1, SCORES),),
        sampled=(TokensSampled(REQUEST, 1, 0, (17,), scores=SCORES),),
        stamps=STAMPS,
    ),
    IterationDone(
        epoch=1,
        iteration=2,
        slots=(Slot(1),),
        token_ids=(9,),
        received_ns=1,
        started_ns=2,
        finished_ns=3,
        device_ns=1,
        sampled_scores=(SlotScores(Slot(1), 9, SCORES),),
        prompt_scores=(SlotScores(Slot(1), 1, SCORES),),
    ),
    RequestArrived(
        request_id=REQUEST,
        tokenizer_id=TokenizerId(InstanceId("tokenizer-1")),
        attempt=1,
        token_ids=pack_ids([1]),
        num_prompt_tokens=1,
        max_tokens=16,
        seed=0,
        sampling=Sampling(
            presence_penalty=0.5,
            frequency_penalty=-2.0,
            repetition_penalty=1.5,
            logit_bias=((7, -100.0), (0, 0.5)),
            logprobs=5,
            prompt_logprobs=0,
        ),
    ),
]


@pytest.mark.parametrize("message", ADDED, ids=lambda message: type(message).__name__)
def test_what_was_added_since_protocol_1_0_round_trips(message: AnyMessage) -> None:
    assert decode(encode(message)) == message


def test_scores_say_of_each_token_what_it_was_and_what_else_could_have_come() -> None:
    assert list(SCORES) == [(-0.5, [(7, -0.25), (9, -2.0)]), (-1.5, [(8, -1.5), (0, -3.0)])]
    assert (SCORES.num_tokens, SCORES.num_top) == (2, 2)
    assert SCORES.is_whole(2, 2)
    assert not any(SCORES.is_whole(*counts) for counts in ((1, 2), (2, 1), (2, 4)))
    assert list(TokenScores.of([-1.0])) == [(-1.0, [])]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81\xa4type",
        msgpack.packb({"type": "Nobody"}),
        msgpack.packb({"type": "Cancel"}),
        msgpack.packb({"type": "Cancel", "request_ids": [1]}),
        msgpack.packb({"type": "Credit", "num_messages": "4"}),
        msgpack.packb([1, 2]),
        msgpack.packb({"type": "Credit", "num_messages": 1}) + b"\x00",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb({"type": "Bye", "detail": b"\xff\xfe"}),
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)


def test_a_steady_plan_costs_a_few_bytes() -> None:
    assert len(encode(Plan(epoch=3, iteration=100_000))) < 40


def test_token_ids_survive_packing() -> None:
    ids = [0, 1, 49151, 2**31 - 1]
    assert list(unpack_ids(pack_ids(ids))) == ids
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"\x00\x01\x02")


def test_structs_are_immutable() -> None:
    with pytest.raises(AttributeError):
        EXAMPLES[1].detail = "other"  # type: ignore[union-attr,misc]
    assert issubclass(Plan, msgspec.Struct)
