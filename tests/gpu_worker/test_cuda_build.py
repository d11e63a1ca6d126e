"""From a device's memory to a KV pool; from a runner to results in order; random weights."""

import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from common.ids import RequestId, Slot, pack_ids
from common.messages.plans import IterationDone, NewRequest, Plan, PlanChunk
from common.messages.requests import Sampling
from common.models import find_model
from gpu_worker.attention import choose_backend
from gpu_worker.attention.base import AttentionSpec
from gpu_worker.attention.paged import TorchPagedAttention
from gpu_worker.build import Built, build
from gpu_worker.config import WorkerConfig
from gpu_worker.cuda.build import PoolOptions, build_runner, largest_rows
from gpu_worker.cuda.device import HostDevice, HostEvent
from gpu_worker.cuda.operations import TorchOperations
from gpu_worker.cuda.pipeline import Pipeline
from gpu_worker.cuda.pool import SLACK_BYTES, MemoryFacts, num_blocks
from gpu_worker.cuda.results import Computed
from gpu_worker.cuda.runner import CudaRunner
from gpu_worker.device_thread import Connection, DeviceThread
from gpu_worker.errors import BackendUnavailable, UnusableModel
from gpu_worker.loading import LoadedModel, load_model, open_model
from gpu_worker.slots import Limits
from tests.gpu_worker.device_world import DeviceWorld, WatchedDevice
from tests.gpu_worker.hf import hf_greedy, tiny_llama, tiny_of
from tests.gpu_worker.world import load, prompt

TIMEOUT_S = 30
GIB = 1 << 30
FACTS = MemoryFacts(total_bytes=80 * GIB, free_bytes=50 * GIB, held_bytes=28 * GIB, peak_bytes=20 * GIB)
BLOCK = {"block_bytes": 1 << 21, "block_size": 16, "max_model_len": 8192}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    tiny_llama(path, groups=3, max_position_embeddings=64)
    return load(path)


def test_the_pool_takes_what_others_weights_activations_and_reserves_leave() -> None:
    blocks = num_blocks(FACTS, memory_share=0.5, reserve_bytes=GIB, **BLOCK)
    # 40 allowed, 2 of others, 20 at the peak, 1 for graphs; and one block that plans do not know.
    assert (blocks + 1) * BLOCK["block_bytes"] <= 17 * GIB - SLACK_BYTES < (blocks + 2) * BLOCK["block_bytes"]


def test_a_pool_that_holds_no_full_request_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        UnusableModel, match=r"holds 4064 tokens \(0\.50 GiB\), less than one request of --max-model-len"
    ):
        num_blocks(
            MemoryFacts(
                total_bytes=80 * GIB,
                free_bytes=0,
                held_bytes=80 * GIB,
                peak_bytes=72 * GIB - SLACK_BYTES - (255 << 21),
            ),
            memory_share=0.9,
            reserve_bytes=0,
            **BLOCK,
        )


def test_more_tokens_than_fit_are_refused_and_fewer_are_taken() -> None:
    assert num_blocks(FACTS, memory_share=0.5, kv_tokens=10000, **BLOCK) == 625
    with pytest.raises(UnusableModel, match=r"--kv-tokens 10000000 needs 1220\.\d+ GiB; \d+ tokens fit"):
        num_blocks(FACTS, memory_share=0.5, kv_tokens=10_000_000, **BLOCK)


@pytest.mark.parametrize(("slots", "tokens", "context"), [(4, 64, 200), (4, 64, 20), (3, 3, 64), (1, 64, 64)])
def test_the_largest_iteration_fills_every_slot_and_every_token_that_requests_may_have(
    slots: int, tokens: int, context: int
) -> None:
    limits = Limits(
        vocab_size=50,
        max_model_len=context,
        block_size=16,
        num_blocks=0,
        max_num_slots=slots,
        max_chunk_tokens=tokens,
    )
    rows, blocks = largest_rows(limits)
    assert len({row.resident.slot for row in rows}) == len(rows) == slots
    assert sum(row.num_tokens for row in rows) == min(tokens, slots * context)
    assert max(row.num_tokens for row in rows) <= context
    tables = [block for row in rows for block in row.resident.block_table]
    assert sorted(tables) == list(range(blocks))


def built_on_host(model: LoadedModel) -> Built:
    limits = Limits(
        vocab_size=model.config.vocab_size,
        max_model_len=model.max_model_len,
        block_size=4,
        num_blocks=0,
        max_num_slots=8,
        max_chunk_tokens=64,
    )
    spec = AttentionSpec(
        device="cpu",
        dtype=torch.float32,
        num_heads=model.config.num_heads,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=4,
    )
    device = HostDevice(memory_bytes=2 * GIB)
    runner, limits = build_runner(
        device,
        model,
        TorchPagedAttention(),
        TorchOperations(),
        spec,
        limits,
        PoolOptions(memory_share=0.9, kv_tokens=256),
    )
    card: Any = None  # A card is for schedulers.
    return Built(runner, limits, card)


def test_a_device_thread_runs_plans_one_ahead_and_reports_them_in_order(model: LoadedModel, path: Path) -> None:
    built = built_on_host(model)
    assert built.limits.num_blocks == 64
    results: queue.Queue[Any] = queue.Queue()
    thread = DeviceThread(
        build=lambda should_stop: built, on_built=lambda built: None, on_failed=results.put, max_queued_plans=16
    )
    connection = Connection(built.limits, results.put)
    request = NewRequest(
        slot=Slot(3),
        request_id=RequestId("r"),
        token_ids=pack_ids(prompt(9)),
        num_prompt_tokens=9,
        seed=0,
        sampling=Sampling(temperature=0.0),
        block_table=pack_ids(range(16)),
    )
    first = Plan(epoch=1, iteration=0, introduced=(request,), chunks=(PlanChunk(Slot(3), 0, 9, is_sampled=True),))
    plans = [first, Plan(epoch=1, iteration=1, decode_added=(Slot(3),))]
    plans += [Plan(epoch=1, iteration=index) for index in range(2, 8)]
    plans += [Plan(epoch=1, iteration=8, decode_removed=(Slot(3),))]  # of no row
    for plan in plans:
        assert thread.submit(connection, plan, received_ns=plan.iteration)
    done = [results.get(timeout=TIMEOUT_S) for _ in plans]
    thread.stop()
    assert all(isinstance(result, IterationDone) for result in done), done
    assert [result.iteration for result in done] == list(range(9))
    expected = hf_greedy(tiny_llama(path, groups=3, max_position_embeddings=64), prompt(9), 8)
    assert [token for result in done for token in result.token_ids] == expected
    assert all(result.device_ns > 0 and result.slots == (3,) for result in done[:-1])
    assert done[-1].slots == ()


class SlowDevice(WatchedDevice):
    """Its iterations are done when the test says so; it counts those that are launched and not waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.may_finish, self.has_two, self.has_three = threading.Event(), threading.Event(), threading.Event()
        self.may_finish.set()
        self.num_in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    def event(self) -> HostEvent:
        device = self

        class SlowEvent(HostEvent):
            def wait(self) -> None:
                super().wait()
                assert device.may_finish.wait(TIMEOUT_S)
                with device.lock:
                    device.num_in_flight -= 1

        return SlowEvent()

    def side_stream(self) -> Any:
        with self.lock:
            self.num_in_flight += 1  # Once in each launch.
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
            if self.num_in_flight >= 2:
                (self.has_two if self.num_in_flight == 2 else self.has_three).set()
        return super().side_stream()


def test_no_more_iterations_are_in_flight_than_there_are_buffers(model: LoadedModel) -> None:
    device = SlowDevice()
    world = DeviceWorld(model, device=device)
    world.add("a", prompt(4), room=12)
    world.prefill("a", 4)
    device.most_in_flight = 0
    device.may_finish.clear()
    results: list[Computed] = []
    pipeline = Pipeline(world.runner, on_failed=lambda error: results.append(Computed([-1], 0)))

    def launch() -> None:
        for _ in range(6):
            pipeline.run(tuple(world.rows({"a": 1})), lambda computed, finished_ns: results.append(computed))

    launcher = threading.Thread(target=launch)
    launcher.start()
    assert device.has_two.wait(TIMEOUT_S)  # The second is launched though the first is not done.
    assert not device.has_three.wait(0.3)  # The launcher is at it by now; it would overwrite the first one's buffers.
    device.may_finish.set()
    launcher.join(TIMEOUT_S)
    pipeline.close()
    assert device.most_in_flight == 2
    fresh = DeviceWorld(model)
    fresh.add("a", prompt(4), room=12)
    fresh.prefill("a", 4)
    assert [token for computed in results for token in computed.token_ids] == fresh.decode(["a"], 6)["a"]


def test_the_thread_that_waits_makes_the_device_its_own_before_it_waits(model: LoadedModel) -> None:
    """A new thread's current device is the first one, whose memory is another worker's."""
    entered: list[int] = []

    class Entered(WatchedDevice):
        def enter_thread(self) -> None:
            entered.append(threading.get_ident())

    world = DeviceWorld(model, device=Entered())
    world.add("a", prompt(4), room=12)
    waited: queue.Queue[int] = queue.Queue()
    pipeline = Pipeline(world.runner, on_failed=lambda error: waited.put(-1))
    pipeline.run(tuple(world.rows({"a": 4})), lambda computed, finished_ns: waited.put(threading.get_ident()))
    assert [waited.get(timeout=TIMEOUT_S)] == entered
    pipeline.close()


def test_a_failing_report_ends_the_pipeline_and_nobody_waits_for_it(model: LoadedModel) -> None:
    world = DeviceWorld(model)
    world.add("a", prompt(4), room=30)
    world.prefill("a", 4)
    failures: queue.Queue[BaseException] = queue.Queue()

    def report(computed: Computed, finished_ns: int) -> None:
        raise RuntimeError("the peer is a bug")

    pipeline = Pipeline(world.runner, failures.put)
    for _ in range(8):
        pipeline.run(tuple(world.rows({"a": 1})), report)
    assert str(failures.get(timeout=TIMEOUT_S)) == "the peer is a bug"
    pipeline.close()


def test_dummy_weights_need_a_config_alone_and_are_the_same_each_time(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    sources = [open_model(find_model(str(tmp_path)), dummy_seed=seed) for seed in (1, 1, 2)]
    first, again, other = (load_model(source, torch.float32).weights for source in sources)
    assert torch.equal(first.layers[1].gate_up, again.layers[1].gate_up)
    assert not torch.equal(first.layers[1].gate_up, other.layers[1].gate_up)
    assert not torch.equal(first.layers[1].gate_up, first.layers[2].gate_up)
    assert float(first.head.std()) == pytest.approx(0.02, rel=0.05)
    assert (first.final_norm == 1).all()
    world = DeviceWorld(load_model(sources[0], torch.float32))
    world.add("a", prompt(9), room=4)
    assert 0 <= world.prefill("a", 9) < 199


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "sees 0 CUDA devices, --device-index is 0"),
        ({"deterministic": True}, "sees 0 CUDA devices, --device-index is 0"),
        ({"weights": "int8"}, "--weights int8 is for CPUs so far"),
    ],
)
def test_a_gpu_that_is_not_there_is_said_to_be_missing_before_weights_are_read(
    model: LoadedModel, path: Path, options: dict[str, Any], problem: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    config = WorkerConfig(scheduler="tcp://127.0.0.1:9", model=str(path), device="cuda", threads=1, **options)
    with pytest.raises(BackendUnavailable, match=problem):
        build(config)


def test_deterministic_is_refused_for_layers_that_its_kernels_do_not_compute(tmp_path: Path) -> None:
    tiny_of("qwen3", tmp_path)
    config = WorkerConfig(
        scheduler="tcp://127.0.0.1:9", model=str(tmp_path), device="cuda", threads=1, deterministic=True
    )
    with pytest.raises(BackendUnavailable, match=r"layers like Llama's; this model has norms of queries and keys"):
        build(config)


def test_deterministic_leaves_one_back_end_to_choose_from(model: LoadedModel) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    pytest.importorskip("triton")
    spec = AttentionSpec.of(model.config, device="cuda:0", dtype=torch.float32, block_size=16)
    with pytest.raises(BackendUnavailable, match=r"'auto' is unavailable: triton: it needs compute capability 8\.0$"):
        choose_backend("auto", spec, must_be_invariant=True)


def test_a_runner_wants_one_block_that_no_plan_can_name(model: LoadedModel) -> None:
    world = DeviceWorld(model)
    limits = Limits(
        vocab_size=model.config.vocab_size,
        max_model_len=model.max_model_len,
        block_size=4,
        num_blocks=world.runner.kv_cache.num_blocks,
        max_num_slots=4,
        max_chunk_tokens=64,
    )
    with pytest.raises(AssertionError, match="last block"):
        CudaRunner(HostDevice(), model, world.runner.kv_cache, TorchPagedAttention(), TorchOperations(), limits)
