"""The device that is only time: when results are due, what they say, and what the worker says of itself."""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
import uvloop

from common.config import ConfigError, load
from common.cost.devices import DEVICES
from common.cost.load import Load
from common.cost.roofline import Roofline
from common.cost.shapes import SHAPES
from common.ids import RequestId, Slot, pack_ids
from common.messages.plans import IterationDone, NewRequest, Plan, PlanChunk, PlanRefused
from common.messages.requests import Sampling
from common.models import ModelFiles
from gpu_worker.config import WorkerConfig
from gpu_worker.errors import UnusableModel
from gpu_worker.simulated.alarm import Alarm, LoopAlarm, TimerfdAlarm
from gpu_worker.simulated.device import Draw, SimulatedDevice
from gpu_worker.simulated.facts import read_facts
from gpu_worker.simulated.profiles import UnknownProfile, known_profiles, points_of, profile_named
from gpu_worker.simulated.shell import card_of
from gpu_worker.slots import Limits

ROOFLINE = Roofline(SHAPES["mistral-7b"], DEVICES["a100-80"])
LIMITS = Limits(vocab_size=100, max_model_len=400, block_size=4, num_blocks=256, max_num_slots=8, max_chunk_tokens=300)
WORDS = array("i", range(40, 80))
EOS = 7


def new_device(draw: Draw | None = None, free_ns: int = 0) -> SimulatedDevice:
    return SimulatedDevice(LIMITS, ROOFLINE, draw or Draw(WORDS, (EOS,)), free_ns)


def new(slot: int, num_tokens: int, seed: int = 0, **sampling: Any) -> NewRequest:
    return NewRequest(
        slot=Slot(slot),
        request_id=RequestId(f"r{slot}"),
        token_ids=pack_ids([1] * num_tokens),
        num_prompt_tokens=num_tokens,
        seed=seed,
        sampling=Sampling(**sampling),
        block_table=pack_ids(range(slot * 80, slot * 80 + 80)),
    )


def opening(slot: int, num_tokens: int, **request: Any) -> Plan:
    """A plan that computes one whole prompt."""
    chunk = PlanChunk(Slot(slot), 0, num_tokens, is_sampled=True)
    return Plan(epoch=1, iteration=0, introduced=(new(slot, num_tokens, **request),), chunks=(chunk,))


def taken(device: SimulatedDevice) -> IterationDone:
    """The next result, when it is due."""
    assert device.next_due_ns is not None
    due = device.take(device.next_due_ns)
    assert due is not None
    assert isinstance(due.result, IterationDone), due.result
    return due.result


def sample(device: SimulatedDevice, num_decodes: int, **request: Any) -> list[int]:
    """The tokens of one request alone."""
    device.submit(opening(0, 5, **request), 0)
    for iteration in range(1, num_decodes + 1):
        device.submit(Plan(epoch=1, iteration=iteration, decode_added=(Slot(0),) if iteration == 1 else ()), 0)
    return [token_id for _ in range(num_decodes + 1) for token_id in taken(device).token_ids]


def test_a_result_is_due_when_the_cost_model_says_and_not_before() -> None:
    device = new_device()
    device.submit(opening(0, 200), received_ns=1_000)
    load_of_prompt = Load()
    load_of_prompt.add_chunk(0, 200, is_sampled=True)
    due_ns = 1_000 + round(ROOFLINE.time_ns(load_of_prompt))
    assert device.next_due_ns == due_ns
    assert device.take(due_ns - 1) is None
    done = taken(device)
    assert (done.received_ns, done.started_ns, done.finished_ns) == (1_000, 1_000, due_ns)
    assert done.device_ns == due_ns - 1_000


def test_a_decode_is_timed_as_a_decode_with_its_context() -> None:
    device = new_device()
    device.submit(opening(0, 200), 0)
    device.submit(Plan(epoch=1, iteration=1, decode_added=(Slot(0),)), 0)
    taken(device)
    decode = Load()
    decode.add_decodes(1, 200)
    assert taken(device).device_ns == round(ROOFLINE.time_ns(decode))


def test_plans_run_one_after_another_however_late_their_results_are_taken() -> None:
    device = new_device()
    device.submit(opening(0, 200), received_ns=0)
    device.submit(Plan(epoch=1, iteration=1, decode_added=(Slot(0),)), received_ns=5)
    first = taken(device)
    second = taken(device)
    assert (second.received_ns, second.started_ns) == (5, first.finished_ns)
    assert device.next_due_ns is None
    idle_until_ns = second.finished_ns + 999
    device.submit(Plan(epoch=1, iteration=2), idle_until_ns)
    assert taken(device).started_ns == idle_until_ns


def test_a_new_connection_waits_for_what_an_earlier_one_had_running() -> None:
    device = new_device(free_ns=5_000)
    device.submit(opening(0, 10), received_ns=100)
    assert taken(device).started_ns == 5_000


def test_tokens_are_words_of_the_vocabulary_and_a_function_of_seed_and_position() -> None:
    alone = sample(new_device(), 40, seed=3)
    assert alone == sample(new_device(), 40, seed=3)
    assert alone != sample(new_device(), 40, seed=4)
    assert set(alone) <= set(WORDS)
    assert len(set(alone)) > 10
    # A request that is placed again, with what it had as known tokens, goes on as it would have.
    again = new_device()
    chunk = PlanChunk(Slot(2), 0, 25, is_sampled=True)
    again.submit(Plan(epoch=1, iteration=0, introduced=(new(2, 25, seed=3),), chunks=(chunk,)), 0)
    assert taken(again).token_ids == (alone[20],)


def test_no_request_ends_by_itself_unless_the_operator_asks_for_it() -> None:
    draw = Draw(WORDS, (EOS,), mean_output_len=4)
    assert EOS not in sample(new_device(), 100)
    tokens = sample(new_device(draw), 100)
    assert 10 <= tokens.count(EOS) <= 50  # A binomial of 101 and 1/4, as wide as five deviations.
    assert EOS not in sample(new_device(draw), 100, ignore_eos=True)
    at_last = sample(new_device(draw), 100, min_tokens=30)
    assert EOS not in at_last[:30]
    assert at_last[30:] == tokens[30:]


def test_stop_ids_are_not_drawn_by_chance() -> None:
    stops = tuple(sample(new_device(), 10)[:3])
    assert set(sample(new_device(), 100, stop_token_ids=stops)).isdisjoint(stops)


def test_a_plan_that_cannot_be_applied_is_refused_in_its_turn() -> None:
    device = new_device()
    device.submit(opening(0, 200), 0)
    device.submit(Plan(epoch=1, iteration=7), 0)
    device.submit(Plan(epoch=1, iteration=8), 0)  # Of a refused epoch: nothing comes of it.
    first = taken(device)
    due = device.take(first.finished_ns)
    assert due is not None
    assert due.result == PlanRefused(epoch=1, iteration=7, detail="iteration 7 came where 1 was due")
    assert device.num_queued == 0


def test_every_known_profile_has_room_and_every_other_is_refused_with_the_list() -> None:
    names = known_profiles()
    assert "a100-mistral-7b" in names
    for name in names:
        profile = profile_named(name)
        assert profile.kv_tokens > 0
        points = points_of(profile, 2048)
        assert [point.num_tokens for point in points] == [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
        assert all(earlier.iteration_ns <= later.iteration_ns for earlier, later in itertools.pairwise(points))
    with pytest.raises(UnknownProfile, match="known: a100-mistral-7b, "):
        profile_named("a100-mistral-8b")


def test_a_model_that_is_too_large_for_one_device_fits_on_several() -> None:
    with pytest.raises(UnknownProfile, match=r"1 x 80 GB leave no room for KV .* try h100-llama2-70b-tp2"):
        profile_named("h100-llama2-70b")
    group = profile_named("h100-llama2-70b-tp4")
    assert (group.device_kind, group.tensor_parallel) == ("h100", 4)
    assert 100_000 < group.kv_tokens < 1_000_000


def worker_config(**options: Any) -> WorkerConfig:
    flags = {"scheduler": "tcp://127.0.0.1:9", "device": "simulated", "profile": "a100-mistral-7b", **options}
    return load(WorkerConfig, "worker", flags, environ={})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"profile": None}, "--device is simulated, --profile None"),
        ({"device": "cpu"}, "--device is cpu, --profile a100-mistral-7b"),
        ({"profile": "toaster"}, "--profile is 'toaster'; known: a100-mistral-7b"),
        ({"simulated_output_len": -1}, "--simulated-output-len is -1"),
    ],
)
def test_options_of_the_simulated_device_are_checked_at_the_start(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        worker_config(**options)


def hugging_face(directory: Path) -> ModelFiles:
    """A model's metadata, without weights."""
    (directory / "config.json").write_text(
        json.dumps({"vocab_size": 60, "max_position_embeddings": 512, "eos_token_id": [3, 4], "hidden_size": 8})
    )
    vocab = {"<s>": 0, "Ġgood": 3, "x": 5, **{f"Ġ{'abc'[i % 3] * (3 + i // 3)}": 10 + i for i in range(20)}}
    tokenizer = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": [{"id": 0}, {"id": 10}]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return ModelFiles(name="tiny", directory=directory)


def test_only_plain_words_that_end_nothing_are_sampled(tmp_path: Path) -> None:
    facts = read_facts(hugging_face(tmp_path))
    assert (facts.name, facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == ("tiny", 60, 512, (3, 4))
    assert list(facts.word_ids) == list(range(11, 30))  # 3 ends a request, 10 is an added token.


def test_a_vocabulary_without_plain_words_gives_every_id_but_the_ends(tmp_path: Path) -> None:
    files = hugging_face(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert set(read_facts(files).word_ids) == set(range(60)) - {3, 4}


def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(UnusableModel, match=r"broken\.gguf: not a readable GGUF file"):
        read_facts(ModelFiles(name="broken", gguf=tmp_path / "broken.gguf"))


def test_the_card_takes_time_and_memory_from_the_profile_and_tokens_from_the_model(tmp_path: Path) -> None:
    facts = read_facts(hugging_face(tmp_path))
    profile = profile_named("a100-mistral-7b")
    card = card_of(worker_config(max_model_len=100_000), profile, facts)
    assert (card.model.name, card.model.max_model_len, card.model.vocab_size) == ("tiny", 100_000, 60)
    assert (card.device, card.device_kind, card.shape) == (
        "simulated a100-mistral-7b",
        "a100-80",
        SHAPES["mistral-7b"],
    )
    assert card.num_blocks == profile.kv_tokens // 16
    assert card_of(worker_config(kv_tokens=1600), profile, facts).num_blocks == 100


@pytest.mark.parametrize("kind", [TimerfdAlarm, LoopAlarm])
def test_an_alarm_rings_once_for_the_time_set_last_and_never_early(kind: Any) -> None:
    if kind is TimerfdAlarm and sys.platform != "linux":
        pytest.skip("timerfd is Linux'")

    async def test() -> None:
        rung: list[int] = []
        has_rung = asyncio.Event()

        def ring() -> None:
            rung.append(time.monotonic_ns())
            has_rung.set()

        alarm: Alarm = kind(ring)
        dues_ns = []
        for _ in range(50):  # Many, because a wake that comes too early may still find the loop late enough.
            dues_ns.append(time.monotonic_ns() + 2_000_000)
            alarm.set(dues_ns[-1] - 1_000_000)
            alarm.set(dues_ns[-1])
            await asyncio.wait_for(has_rung.wait(), 10)
            has_rung.clear()
        dues_ns.append(0)  # Long past: at once.
        alarm.set(0)
        await asyncio.wait_for(has_rung.wait(), 10)
        alarm.set(time.monotonic_ns() + 1_000_000)
        alarm.close()
        await asyncio.sleep(0.01)
        assert len(rung) == len(dues_ns)
        assert all(at_ns >= due_ns for at_ns, due_ns in zip(rung, dues_ns, strict=True))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


def test_a_simulated_worker_needs_neither_torch_nor_numpy() -> None:
    script = "import gpu_worker.__main__, gpu_worker.simulated.shell, sys; print({'torch', 'numpy'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "set()\n"
