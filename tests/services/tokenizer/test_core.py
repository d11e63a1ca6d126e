"""The tokenizer's decisions, by hand: one event, and what the world is told of it."""

from typing import Any

import pytest

from common.ids import RequestId, pack_ids
from common.messages import CallFailed, Cancel, Decode, Decoded, Encode, Encoded, StopReached
from common.messages.cards import ModelCard
from common.messages.gaps import NO_GAP, WorkerGap
from common.messages.requests import (
    ChatPrompt,
    Choice,
    FinishReason,
    IdsPrompt,
    RejectReason,
    RequestQueued,
    RequestRejected,
    Sampling,
    TextPrompt,
)
from services.tokenizer.events import (
    ArrivalNotSent,
    DropScheduler,
    FromScheduler,
    GatewayLink,
    GatewayUp,
    SchedulerUp,
    ToGateway,
)
from services.tokenizer.text.model_tokenizer import ModelTokenizer
from services.tokenizer.validation import RETRY_AFTER_S
from tests.services.tokenizer.world import EOS, STAMPS, World, ended, known_ids, pool_card, submit


@pytest.fixture
def world(smollm2: ModelTokenizer) -> World:
    return World(smollm2, num_gateways=2)


def test_each_choice_of_a_submit_arrives_at_the_scheduler_with_the_prompt_encoded_once(world: World) -> None:
    effects = world.send(
        submit("a", "b", priority=3, tbt_target_ms=50.0, cache_salt="s", traceparent="00-1-2-01", tracestate="x=y")
    )
    assert len(effects) == 1, "one prompt, one job"
    world.run_jobs()
    first, second = world.arrivals()
    assert (first.request_id, second.request_id) == ("a", "b")
    assert (first.seed, second.seed) == (0, 1)
    assert known_ids(first) == known_ids(second) == world.ids("Hello")
    assert (first.num_prompt_tokens, first.max_tokens, first.attempt) == (1, 20, 1)
    assert (first.priority, first.tbt_target_ms, first.cache_salt) == (3, 50.0, "s")
    assert (first.traceparent, first.tracestate) == ("00-1-2-01", "x=y")
    assert first.tokenizer_id == "tokenizer-1"


def test_chats_and_ids_arrive_too(world: World, smollm2: ModelTokenizer) -> None:
    message = {"role": "user", "content": "Hi"}
    world.step(FromScheduler(pool_card()))
    world.arrive("chat", prompt=ChatPrompt(messages=(message,)))
    world.arrive("ids", prompt=IdsPrompt(token_ids=pack_ids([5, 6, 7])))
    chat, ids = world.arrivals()
    assert known_ids(chat) == list(smollm2.encoder.encode_chat([message]))
    assert known_ids(ids) == [5, 6, 7]


def test_without_max_tokens_a_request_may_run_to_the_end_of_context_or_cache(world: World) -> None:
    world.arrive("context", max_tokens=None)
    world.step(FromScheduler(pool_card(kv_capacity=40)))
    world.arrive("cache", max_tokens=None)
    assert [arrival.max_tokens for arrival in world.arrivals()] == [63, 39]


@pytest.mark.parametrize(
    ("changes", "reason", "param", "detail"),
    [
        ({"model": "gpt-9"}, RejectReason.UNKNOWN_MODEL, "model", "'gpt-9' does not exist; this server has 'smollm2'"),
        ({"prompt": ""}, RejectReason.INVALID, "prompt", "prompt has no tokens"),
        ({"prompt": IdsPrompt(token_ids=b"")}, RejectReason.INVALID, "prompt", "prompt has no tokens"),
        (
            {"prompt": IdsPrompt(token_ids=pack_ids([1, 49152]))},
            RejectReason.INVALID,
            "prompt",
            "49152 is outside the vocabulary, 0 to 49151",
        ),
        ({"prompt": IdsPrompt(token_ids=pack_ids([-1]))}, RejectReason.INVALID, "prompt", "-1 is outside"),
        ({"prompt": IdsPrompt(token_ids=b"abc")}, RejectReason.INVALID, "prompt", "3 bytes are no list"),
        (
            {"prompt": IdsPrompt(token_ids=pack_ids([5] * 64))},
            RejectReason.INVALID,
            "prompt",
            "prompt has 64 tokens; this model accepts 64",
        ),
        (
            {"prompt": IdsPrompt(token_ids=pack_ids([5] * 45))},
            RejectReason.INVALID,
            "max_tokens",
            "prompt has 45 tokens and max_tokens is 20, together 65; this model accepts 64",
        ),
        ({"prompt": "word " * 100_000}, RejectReason.INVALID, "prompt", "prompt has 500000 characters"),
        ({"prompt": ChatPrompt(messages=({"content": "x"},))}, RejectReason.INVALID, "messages", "chat template"),
        (
            {"prompt": ChatPrompt(messages=({"role": "user", "content": "x" * 99_000},))},
            RejectReason.INVALID,
            "messages",
            "characters",
        ),
        ({"max_tokens": 0}, RejectReason.INVALID, "max_tokens", "max_tokens is 0"),
        (
            {"sampling": Sampling(min_tokens=21)},
            RejectReason.INVALID,
            "min_tokens",
            "min_tokens is 21, more than max_tokens, 20",
        ),
        (
            {"sampling": Sampling(min_tokens=64), "max_tokens": None},
            RejectReason.INVALID,
            "min_tokens",
            "after a prompt of 1 tokens there is room for 63",
        ),
        ({"sampling": Sampling(stop_token_ids=(49152,))}, RejectReason.INVALID, "stop_token_ids", "49152"),
        ({"stop": ("a", "")}, RejectReason.INVALID, "stop", "empty"),
    ],
)
def test_what_can_never_run_is_rejected_with_the_field_and_the_numbers_and_the_scheduler_hears_nothing(
    world: World, changes: dict[str, Any], reason: RejectReason, param: str, detail: str
) -> None:
    world.arrive("a", "b", **changes)
    for name in "ab":
        rejection = world.rejection(name)
        assert (rejection.reason, rejection.param, rejection.attempt) == (reason, param, 1)
        assert detail in rejection.detail
        assert rejection.retry_after_s is None
    assert world.to_scheduler == []
    assert world.core.num_open == 0
    world.arrive("next")
    assert len(world.arrivals()) == 1, "the next request works"


def test_what_no_kv_cache_of_the_pool_can_hold_is_too_large(world: World) -> None:
    world.step(FromScheduler(pool_card(kv_capacity=16)))
    world.arrive("prompt", prompt=IdsPrompt(token_ids=pack_ids([5] * 16)), max_tokens=None)
    world.arrive("output", max_tokens=16)
    for name, param, detail in (("prompt", "prompt", "16 tokens"), ("output", "max_tokens", "together 17")):
        rejection = world.rejection(name)
        assert (rejection.reason, rejection.param) == (RejectReason.TOO_LARGE, param)
        assert detail in rejection.detail
        assert "holds 16" in rejection.detail


def test_without_scheduler_card_or_worker_requests_are_turned_away_to_come_again(smollm2: ModelTokenizer) -> None:
    world = World(smollm2, is_ready=False)
    assert "scheduler is not connected" in world.core.missing
    world.arrive("no scheduler")
    world.step(SchedulerUp())
    assert "which model" in world.core.missing
    world.arrive("no card")
    world.step(FromScheduler(pool_card(num_workers=0)))
    assert "no worker" in world.core.missing
    world.arrive("no worker")
    for name in ("no scheduler", "no card", "no worker"):
        rejection = world.rejection(name)
        assert (rejection.reason, rejection.retry_after_s) == (RejectReason.UNAVAILABLE, RETRY_AFTER_S)
    world.step(FromScheduler(pool_card()))
    assert world.core.missing == ""


def test_a_worker_lost_while_a_prompt_is_encoded_turns_the_request_away(world: World) -> None:
    world.send(submit("a"))
    world.step(FromScheduler(pool_card(num_workers=0)))
    world.run_jobs()
    assert world.rejection("a").reason is RejectReason.UNAVAILABLE
    assert world.to_scheduler == []


def test_open_requests_and_waiting_prompts_are_bounded(smollm2: ModelTokenizer) -> None:
    world = World(smollm2, max_open_requests=3, max_waiting_jobs=2)
    world.send(submit("a", "b"))
    world.send(submit("c", "d"))
    assert "2 requests are open here; the most is 3" in world.rejection("d").detail
    world.send(submit("e"))
    world.run_jobs()
    assert [arrival.request_id for arrival in world.arrivals()] == ["a", "b", "e"]
    world.cancel("a", "b", "e")
    world.send(submit("f"))
    world.send(submit("g"))
    world.send(submit("h"))
    assert "2 prompts wait to be encoded; the most is 2" in world.rejection("h").detail
    for name in ("c", "d", "h"):
        assert world.rejection(name).reason is RejectReason.QUEUE_FULL
        assert world.rejection(name).retry_after_s == RETRY_AFTER_S


def test_a_request_that_the_link_has_no_room_for_is_turned_away(world: World) -> None:
    world.arrive("a")
    world.step(ArrivalNotSent(RequestId("a"), "the link is full"))
    rejection = world.rejection("a")
    assert (rejection.reason, rejection.retry_after_s) == (RejectReason.UNAVAILABLE, RETRY_AFTER_S)
    assert world.core.num_open == 0


def test_tokens_travel_at_once_also_when_they_give_no_text_yet(world: World) -> None:
    world.arrive("a")
    ids = world.ids("né 🦀!")
    for index, token_id in enumerate(ids):
        world.batch(world.sampled("a", [token_id], first_index=index))
    deltas = world.deltas("a")
    assert [delta.token_ids for delta in deltas] == [(token_id,) for token_id in ids]
    assert [delta.first_index for delta in deltas] == list(range(len(ids)))
    assert "" in [delta.text for delta in deltas]
    assert [delta.text_offset for delta in deltas] == [
        sum(len(before.text) for before in deltas[:index]) for index in range(len(deltas))
    ]
    assert world.text("a") == "né 🦀!"
    assert all(delta.stamps == STAMPS for delta in deltas)


def test_a_batch_of_the_scheduler_becomes_one_batch_for_each_gateway(world: World) -> None:
    for gateway, name in ((0, "a"), (1, "b"), (0, "c")):
        world.arrive(name, gateway=gateway)
    queued = tuple(RequestQueued(request_id=RequestId(name), attempt=1, num_prompt_tokens=1) for name in "abc")
    effects = world.batch(
        *(world.sampled(name, world.ids("Hi"), first_index=0) for name in "abc"), queued=queued, ended=(ended("c"),)
    )
    assert [type(effect) for effect in effects] == [ToGateway, ToGateway]
    (first,), (second,) = world.batches(0), world.batches(1)
    assert [row.request_id for row in first.queued + first.deltas] == ["a", "c", "a", "c"]
    assert [row.request_id for row in second.queued + second.deltas] == ["b", "b"]
    assert first.ended == (ended("c"),)


def test_the_end_comes_after_the_text_that_was_held_back(world: World) -> None:
    world.arrive("half", stop=("\n\nUser",))
    crab = world.ids("🦀")
    world.batch(world.sampled("half", [*world.ids("Hi\n\nUse"), *crab[:-1]], first_index=0))
    assert world.text("half") == "Hi"
    world.batch(ended=(ended("half", num_output_tokens=7),))
    assert world.text("half") == "Hi\n\nUse\ufffd"
    (*_, flushed) = world.deltas("half")
    assert (flushed.token_ids, flushed.text_offset) == ((), 2)
    assert world.finish("half") == ended("half", num_output_tokens=7)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.CANCELLED])
def test_after_a_failure_held_text_stays_back_for_whoever_continues(world: World, reason: FinishReason) -> None:
    world.arrive("a", stop=("\n\nUser",))
    world.batch(world.sampled("a", world.ids("Hi\n"), first_index=0), ended=(ended("a", reason),))
    assert world.text("a") == "Hi"
    assert world.finish("a").reason is reason


def test_eos_gives_no_text_and_its_end_is_passed_on(world: World) -> None:
    world.arrive("a")
    eos = ended("a", FinishReason.STOP, stop=EOS, num_output_tokens=2)
    world.batch(world.sampled("a", [*world.ids("Hi"), EOS], first_index=0), ended=(eos,))
    assert world.text("a") == "Hi"
    assert world.finish("a") == eos


def test_a_stop_string_over_three_tokens_ends_the_request_where_it_is_complete(world: World) -> None:
    world.arrive("a", stop=("<|im", "never"))
    ids = world.ids("Sure.<|im_end|>")
    for index, token_id in enumerate(ids):
        world.batch(world.sampled("a", [token_id], first_index=index))
    assert world.text("a") == "Sure."
    assert [delta.token_ids for delta in world.deltas("a")] == [(token_id,) for token_id in ids[:4]]
    end = world.finish("a")
    assert (end.reason, end.stop, end.num_prompt_tokens, end.num_output_tokens) == (FinishReason.STOP, "<|im", 1, 4)
    assert world.to_scheduler[1:] == [StopReached(request_id=RequestId("a"), num_output_tokens=4)]
    world.batch(ended=(ended("a", FinishReason.CANCELLED),))
    assert len(world.ends("a")) == 1


def test_what_follows_a_stop_string_in_one_message_is_neither_sent_nor_counted(world: World) -> None:
    world.arrive("a", stop=("|im",))
    ids = world.ids("Sure.<|im_end|>")
    world.batch(world.sampled("a", ids, first_index=0))
    (delta,) = world.deltas("a")
    assert (delta.token_ids, delta.text) == (tuple(ids[:4]), "Sure.<")
    assert world.finish("a").num_output_tokens == 4


def test_a_stop_string_beats_an_end_in_the_same_batch_and_the_scheduler_need_not_be_told(world: World) -> None:
    world.arrive("a", stop=("Hi",))
    told = ended("a", num_cached_tokens=16, num_preemptions=2)
    world.batch(world.sampled("a", world.ids("Hi"), first_index=0), ended=(told,))
    end = world.finish("a")
    assert (end.reason, end.stop, end.num_output_tokens) == (FinishReason.STOP, "Hi", 1)
    assert (end.num_cached_tokens, end.num_preemptions) == (16, 2)
    assert not any(isinstance(message, StopReached) for message in world.to_scheduler)


def test_a_stop_string_that_only_the_end_completes_counts(world: World) -> None:
    world.arrive("a", stop=("\ufffd",))
    world.batch(world.sampled("a", world.ids("🦀")[:1], first_index=0))
    world.batch(ended=(ended("a", num_output_tokens=1),))
    assert world.text("a") == ""
    assert (world.finish("a").reason, world.finish("a").stop) == (FinishReason.STOP, "\ufffd")


def test_tokens_known_already_are_skipped_and_older_attempts_ignored(world: World) -> None:
    world.arrive("a", attempt=2)
    ids = world.ids("one two three four")
    world.batch(world.sampled("a", ids[:2], first_index=0, attempt=2))
    world.batch(world.sampled("a", ids[:3], first_index=0, attempt=2))
    world.batch(world.sampled("a", ids[:2], first_index=0, attempt=2))
    world.batch(world.sampled("a", [7], first_index=3, attempt=1), ended=(ended("a", attempt=1),))
    world.batch(world.sampled("a", ids[3:], first_index=3, attempt=2))
    assert world.text("a") == "one two three four"
    assert [(delta.first_index, len(delta.token_ids)) for delta in world.deltas("a")] == [(0, 2), (2, 1), (3, 1)]
    assert world.ends("a") == []


def test_what_the_scheduler_says_of_gaps_goes_up_with_the_tokens(world: World) -> None:
    world.arrive("r-0", "r-1", "r-2")
    gaps = (WorkerGap(decode_ns=7), WorkerGap(preemption_ns=9))
    ids = world.ids("one two")
    world.batch(world.sampled("r-2", ids[:1], 0))
    world.batch(
        world.sampled("r-0", ids[:1], 0, gap=1),
        world.sampled("r-1", ids[:1], 0),
        world.sampled("r-2", ids[:2], 0, gap=0),
        gaps=gaps,
    )
    batch = world.batches(0)[-1]
    assert batch.gaps == gaps
    assert [delta.gap for delta in batch.deltas] == [1, NO_GAP, NO_GAP], "the gap was before a token known already"


def test_a_missing_token_is_a_lost_link(world: World) -> None:
    world.arrive("a")
    (effect,) = world.batch(world.sampled("a", [7], first_index=2))
    assert isinstance(effect, DropScheduler)
    assert "tokens 0 to 1" in effect.detail
    assert world.deltas("a") == []


def test_rejections_of_the_scheduler_are_passed_on(world: World) -> None:
    world.arrive("a")
    rejected = RequestRejected(request_id=RequestId("a"), attempt=1, reason=RejectReason.QUEUE_FULL, detail="100 wait")
    world.batch(ended=(rejected,))
    assert world.rejection("a") == rejected
    assert world.core.num_open == 0


def test_a_cancel_wins_over_its_submit_while_that_is_encoded(world: World) -> None:
    world.send(submit("a"))
    (job_id,) = world.jobs
    world.cancel("a")
    assert world.dropped_jobs == {job_id}
    world.dropped_jobs.clear()  # It ran already, and its result comes back.
    world.run_jobs()
    assert world.to_scheduler == []
    assert (world.finish("a").reason, world.finish("a").num_output_tokens) == (FinishReason.CANCELLED, 0)


def test_the_prompt_of_a_cancelled_request_never_becomes_that_of_its_next_attempt(world: World) -> None:
    world.send(submit("a", prompt="one"))
    world.cancel("a")
    world.send(submit("a", prompt="two", attempt=2))
    world.dropped_jobs.clear()  # The first ran already, and its result comes back.
    world.run_jobs()
    (arrival,) = world.arrivals()
    assert (known_ids(arrival), arrival.attempt) == (world.ids("two"), 2)


def test_a_cancelled_choice_leaves_the_others_alone(world: World) -> None:
    world.send(submit("a", "b"))
    world.cancel("a")
    assert world.dropped_jobs == set()
    world.run_jobs()
    assert [arrival.request_id for arrival in world.arrivals()] == ["b"]


def test_a_cancel_of_running_requests_is_passed_on_as_one_and_ends_them(world: World) -> None:
    world.arrive("a", "b", "c")
    world.batch(world.sampled("a", world.ids("Hi"), first_index=0))
    world.cancel("a", "b", "a", "unknown")
    assert world.to_scheduler[3:] == [Cancel(request_ids=(RequestId("a"), RequestId("b")))]
    end = world.finish("a")
    assert (end.reason, end.num_prompt_tokens, end.num_output_tokens) == (FinishReason.CANCELLED, 1, 1)
    world.batch(world.sampled("a", world.ids("Hi"), first_index=1), ended=(ended("a", FinishReason.CANCELLED),))
    assert len(world.ends("a")) == 1
    assert len(world.deltas("a")) == 1
    assert world.core.num_open == 1


def test_one_gateway_cannot_cancel_anothers_requests(world: World) -> None:
    world.arrive("a")
    assert world.cancel("a", gateway=1) == []
    assert world.core.num_open == 1


def test_a_request_submitted_twice_costs_the_gateway_its_link(world: World) -> None:
    world.arrive("a")
    world.send(submit("a"), gateway=1)
    world.send(submit("b", "b"))
    assert world.dropped_gateways == [1, 0]
    assert world.ends("a") == []


def test_a_newer_attempt_takes_the_place_of_one_whose_link_is_not_yet_known_to_be_lost(world: World) -> None:
    world.arrive("a")
    world.batch(world.sampled("a", world.ids("Hi"), first_index=0))
    again = Choice(request_id=RequestId("a"), seed=0, output_ids=pack_ids(world.ids("Hi")))
    world.arrive("a", gateway=1, attempt=2, choices=(again,))
    first, cancel, second = world.to_scheduler
    assert cancel == Cancel(request_ids=(RequestId("a"),))
    world.batch(ended=(ended("a", FinishReason.CANCELLED),))
    world.lose_gateway(0)
    world.batch(world.sampled("a", world.ids(" you"), first_index=1, attempt=2))
    assert world.text("a", gateway=1) == " you"
    assert world.ends("a", gateway=0) == world.ends("a", gateway=1) == []
    assert world.dropped_gateways == []
    assert (first, second) == tuple(world.arrivals())


def test_a_lost_gateways_requests_are_cancelled_by_one_message(world: World) -> None:
    world.arrive("a", "b")
    world.arrive("other", gateway=1)
    world.send(submit("c"))
    (job_id,) = world.jobs
    world.lose_gateway()
    assert world.to_scheduler[3:] == [Cancel(request_ids=(RequestId("a"), RequestId("b")))]
    assert world.dropped_jobs == {job_id}
    world.run_jobs()
    assert world.batch(world.sampled("a", [7], first_index=0)) == []
    assert world.core.num_open == 1
    assert len(world.arrivals()) == 3


def test_a_lost_scheduler_ends_what_has_begun_and_turns_away_what_has_not(world: World) -> None:
    world.arrive("begun", "queued", stop=("\n\nUser",))
    world.arrive("other", gateway=1)
    world.batch(world.sampled("begun", world.ids("Hi\n"), first_index=0))
    world.send(submit("encoding"))
    world.lose_scheduler()
    assert world.text("begun") == "Hi", "what may be a stop string is left to the next attempt"
    assert world.finish("begun").reason is FinishReason.ERROR
    assert "the connection closed" in world.finish("begun").detail
    assert world.finish("begun").num_output_tokens == 2
    for name, gateway in (("queued", 0), ("other", 1), ("encoding", 0)):
        rejection = world.rejection(name, gateway)
        assert (rejection.reason, rejection.retry_after_s) == (RejectReason.UNAVAILABLE, RETRY_AFTER_S)
    assert world.core.num_open == 0
    assert "scheduler is not connected" in world.core.missing
    world.run_jobs()
    assert len(world.arrivals()) == 3
    assert not any(isinstance(message, Cancel) for message in world.to_scheduler)


def test_gateways_hear_of_the_pool_when_it_changes_when_they_come_and_when_it_is_lost(world: World) -> None:
    assert world.to_gateway == {0: [pool_card()], 1: [pool_card()]}
    world.step(FromScheduler(pool_card(num_workers=2)))
    world.step(GatewayUp(GatewayLink(2)))
    assert world.to_gateway[2] == [pool_card(num_workers=2)]
    world.lose_scheduler()
    for gateway in range(3):
        assert world.to_gateway[gateway][-1] == pool_card(num_workers=0)


def resumed(world: World, delivered: list[int], **changes: Any) -> None:
    choice = Choice(request_id=RequestId("a"), seed=0, output_ids=pack_ids(delivered))
    world.arrive("a", attempt=2, choices=(choice,), **changes)


def test_a_request_goes_on_from_every_token_with_exactly_the_text_that_is_missing(smollm2: ModelTokenizer) -> None:
    whole = World(smollm2)
    ids = whole.ids("né 🦀 a\n\nb\n\nUser: x")
    whole.arrive("a", stop=("\n\nUser",))
    for index, token_id in enumerate(ids):
        whole.batch(whole.sampled("a", [token_id], first_index=index))
    assert whole.text("a") == "né 🦀 a\n\nb"
    deltas = whole.deltas("a")
    for num_delivered in range(len(deltas)):
        world = World(smollm2)
        resumed(world, ids[:num_delivered], stop=("\n\nUser",))
        (arrival,) = world.arrivals()
        assert known_ids(arrival) == [*world.ids("Hello"), *ids[:num_delivered]]
        assert (arrival.num_prompt_tokens, arrival.max_tokens, arrival.attempt) == (1, 20, 2)
        for index in range(num_delivered, len(ids)):
            world.batch(world.sampled("a", [ids[index]], first_index=index, attempt=2))
        assert [(delta.first_index, delta.text_offset, delta.text) for delta in world.deltas("a")] == [
            (delta.first_index, delta.text_offset, delta.text) for delta in deltas[num_delivered:]
        ]
        assert world.finish("a").num_output_tokens == whole.finish("a").num_output_tokens


@pytest.mark.parametrize(
    ("delivered", "changes", "expected", "text"),
    [
        ("Hi there", {"max_tokens": 2}, (FinishReason.LENGTH, None), ""),
        ("Hi\n", {"max_tokens": 2, "stop": ("\n\n",)}, (FinishReason.LENGTH, None), "\n"),
        ("Sure.<|", {"stop": ("<|",)}, (FinishReason.STOP, "<|"), ""),
        ("<|im_end|>", {}, (FinishReason.STOP, EOS), ""),
    ],
)
def test_a_request_whose_whole_output_was_delivered_ends_without_the_scheduler(
    world: World, delivered: str, changes: dict[str, Any], expected: tuple[FinishReason, Any], text: str
) -> None:
    ids = [EOS] if delivered == "<|im_end|>" else world.ids(delivered)
    resumed(world, ids, **changes)
    end = world.finish("a")
    assert (end.reason, end.stop, end.num_output_tokens) == (*expected, len(ids))
    assert world.text("a") == text
    assert world.to_scheduler == []


def test_an_ignored_eos_ends_nothing(world: World) -> None:
    resumed(world, [EOS], sampling=Sampling(ignore_eos=True))
    (arrival,) = world.arrivals()
    assert known_ids(arrival) == [*world.ids("Hello"), EOS]


def test_calls_encode_and_decode(world: World, smollm2: ModelTokenizer) -> None:
    message = {"role": "user", "content": "Hi"}
    world.send(Encode(call_id="1", model="smollm2", prompt=TextPrompt(text="Hello <|im_end|>")))
    world.send(Encode(call_id="2", model="smollm2", prompt=ChatPrompt(messages=(message,))))
    world.send(Decode(call_id="3", model="smollm2", token_ids=pack_ids([EOS, *world.ids("né")])))
    world.run_jobs()
    assert world.to_gateway[0][1:] == [
        Encoded(call_id="1", token_ids=pack_ids(world.ids("Hello <|im_end|>")), max_model_len=64),
        Encoded(call_id="2", token_ids=pack_ids(smollm2.encoder.encode_chat([message])), max_model_len=64),
        Decoded(call_id="3", text="<|im_end|>né"),
    ]


def test_failed_calls_say_which_field(smollm2: ModelTokenizer) -> None:
    world = World(smollm2, max_waiting_jobs=2)
    world.send(Encode(call_id="1", model="gpt-9", prompt=TextPrompt(text="Hello")))
    world.send(Encode(call_id="2", model="smollm2", prompt=ChatPrompt(messages=({},))))
    world.send(Decode(call_id="3", model="smollm2", token_ids=pack_ids([49152])))
    world.send(Encode(call_id="4", model="smollm2", prompt=TextPrompt(text="Hello")))
    world.run_jobs()
    failures = {failed.call_id: failed for failed in world.to_gateway[0][1:] if isinstance(failed, CallFailed)}
    assert {call_id: (failed.reason, failed.param) for call_id, failed in failures.items()} == {
        "1": (RejectReason.UNKNOWN_MODEL, "model"),
        "2": (RejectReason.INVALID, "messages"),
        "3": (RejectReason.INVALID, "tokens"),
        "4": (RejectReason.QUEUE_FULL, ""),
    }


def test_a_call_before_any_pool_is_known_fails(smollm2: ModelTokenizer) -> None:
    world = World(smollm2, is_ready=False)
    world.send(Decode(call_id="1", model="smollm2", token_ids=b""))
    assert world.to_gateway[0][0].reason is RejectReason.UNAVAILABLE


def test_a_models_ids_beyond_the_pools_vocabulary_never_reach_a_worker(world: World) -> None:
    model = ModelCard(name="smollm2", max_model_len=64, vocab_size=100, eos_token_ids=(EOS,))
    world.step(FromScheduler(pool_card(model=model)))
    world.arrive("a")
    assert "outside the vocabulary, 0 to 99" in world.rejection("a").detail
    assert world.to_scheduler == []
