"""Options of a worker: relations between them, and what follows from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from common.config import ConfigError, load
from gpu_worker.build import build, choose_dtype
from gpu_worker.config import WorkerConfig
from gpu_worker.errors import BackendUnavailable, UnusableModel
from gpu_worker.kernels.build import usable_instruction_sets
from gpu_worker.parallel.processes import config_of
from tests.gpu_worker.hf import tiny_llama, tiny_of


def config(**options: Any) -> WorkerConfig:
    return load(WorkerConfig, "worker", {"scheduler": "tcp://127.0.0.1:9", **options}, environ={})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_num_slots": 300, "max_chunk_tokens": 299}, "--max-chunk-tokens is 299, less than --max-num-slots, 300"),
        ({"kv_tokens": 15}, "--kv-tokens is 15, less than one block of --block-size 16"),
        ({"block_size": -1}, "--block-size is -1; the least is 0"),
        ({"gpu_memory_share": 1.0}, "--gpu-memory-share is 1; it must be between 0 and 1"),
        ({"threads": -1}, "--threads is -1; the least is 0"),
        ({"max_queued_plans": 1}, "--max-queued-plans is 1; the least is 2"),
        ({"max_queued_plans": 3, "pp": 3}, "--max-queued-plans is 3; the least is 4"),
        ({"profile_seconds": 0.0}, "--profile-seconds is 0; it must be above 0"),
        ({"profile_seconds": float("nan")}, "--profile-seconds is nan; it must be above 0"),
        ({"tp": 0}, "--tp is 0; the least is 1"),
        ({"tp": 2, "rank": 2, "rank_address": "tcp://127.0.0.1:9"}, "--rank is 2; --tp 2 and --pp 1 make ranks 0 to 1"),
        ({"pp": 2, "rank": 1}, "--rank is 1, which needs --rank-address"),
        ({"pp": 2, "rank_timeout_s": 0.0}, "--rank-timeout-s is 0; it must be above 0"),
        ({"tp": 2, "attention_backend": "native"}, "--attention-backend is native, which several ranks"),
        ({"tp": 2, "attention_backend": "triton"}, "--attention-backend is triton, which several ranks"),
        ({"tp": 2, "device": "cuda", "attention_backend": "cpu"}, "--attention-backend is cpu, which several ranks"),
        ({"tp": 2, "load_format": "dummy"}, "--load-format is dummy, which several ranks"),
        (
            {"device": "cuda", "deterministic": True, "attention_backend": "fa3"},
            "--deterministic true on --device cuda needs --attention-backend triton; it is fa3",
        ),
        ({"tp": 2, "deterministic": True}, "--deterministic is True, which several ranks"),
        ({"tp": 2, "device": "simulated", "profile": "a100-mistral-7b"}, "--device is simulated, which several ranks"),
        ({"link_window": 1}, "--link-window is 1"),
        ({"attention_backend": "fa9"}, "--attention-backend"),
        ({"scheduler": None}, "--scheduler"),
    ],
)
def test_options_that_do_not_fit_together_are_refused_with_both_values(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(**options)


def test_each_rank_that_is_started_here_has_the_next_gpu() -> None:
    first = {"tp": 2, "pp": 2, "rank": 0, "rank_address": "ipc:///tmp/link"}
    cuda = config(**first, device="cuda", device_index=4, admin_port=9103)
    assert [config_of(cuda, rank).device_index for rank in (1, 3)] == [5, 7]
    assert (config_of(cuda, 3).rank, config_of(cuda, 3).admin_port) == (3, 0)
    assert config_of(config(**first), 1).device_index == 0


def test_a_pool_without_a_size_holds_three_requests_of_full_length(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    card = build(config(model=str(tmp_path), threads=1)).card
    assert card.num_blocks * card.block_size == 3 * 1024
    assert card.model.name == tmp_path.name


def test_a_pool_is_whole_blocks_and_the_context_may_be_shortened(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    built = build(config(model=str(tmp_path), threads=1, kv_tokens=100, block_size=8, max_model_len=50))
    assert (built.card.num_blocks, built.card.block_size, built.card.model.max_model_len) == (12, 8, 50)
    assert built.runner.kv_cache.keys[0].shape == (12, 8, 3, 16)
    with pytest.raises(UnusableModel, match="2000; this model was trained for 1024"):
        build(config(model=str(tmp_path), max_model_len=2000))


@pytest.mark.parametrize("instruction_set", usable_instruction_sets())
def test_the_environment_can_name_the_kernels_instruction_set(tmp_path: Path, instruction_set: str) -> None:
    tiny_llama(tmp_path)
    environ = {"LEGATO_KERNELS": instruction_set, "LEGATO_SCHEDULER": "tcp://127.0.0.1:9"}
    named = load(WorkerConfig, "worker", {"model": str(tmp_path), "threads": 1, "kv_tokens": 64}, environ)
    with capture_logs() as logs:
        card = build(named).card
    assert (card.attention, card.is_batch_invariant, card.dtype) == ("native", True, "bfloat16")
    assert [entry["instruction_set"] for entry in logs if entry["event"] == "kernels_loaded"] == [instruction_set]


def test_without_kernels_the_worker_runs_on_torch_and_says_so(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    card = build(config(model=str(tmp_path), threads=1, kv_tokens=64, kernels="off")).card
    assert (card.attention, card.is_batch_invariant) == ("cpu", False)


def test_what_only_the_kernels_can_do_is_refused_without_them(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    small: dict[str, Any] = {"model": str(tmp_path), "threads": 1, "kv_tokens": 64}
    with pytest.raises(BackendUnavailable, match=r"--deterministic needs the attention back end native; this .* cpu"):
        build(config(**small, kernels="off", deterministic=True))
    with pytest.raises(
        BackendUnavailable, match=r"--weights int8 needs the attention back end native; this .* reference"
    ):
        build(config(**small, attention_backend="reference", weights="int8"))
    with pytest.raises(BackendUnavailable, match=r"'native' is unavailable: native: the kernels are switched off"):
        build(config(**small, kernels="off", attention_backend="native"))
    assert build(config(**small, deterministic=True)).card.is_batch_invariant
    assert build(config(**small, weights="int8")).card.shape.bytes_per_weight == 1


def test_dtype_is_what_was_asked_for_or_one_that_is_fast() -> None:
    assert choose_dtype("float32") == torch.float32
    assert choose_dtype("bfloat16") == torch.bfloat16
    assert choose_dtype("auto") in (torch.float32, torch.bfloat16)
    assert choose_dtype("auto", has_kernels=True) == torch.bfloat16


def test_a_family_that_the_kernels_are_not_made_for_runs_on_torch_and_says_so(tmp_path: Path) -> None:
    tiny_of("gemma3", tmp_path / "gemma")
    small: dict[str, Any] = {"model": str(tmp_path / "gemma"), "threads": 1, "kv_tokens": 64}
    card = build(config(**small)).card
    assert (card.attention, card.is_batch_invariant) == ("cpu", False)
    with pytest.raises(BackendUnavailable, match="made for Llama's layers; this model has norms after attention"):
        build(config(**small, attention_backend="native"))
    with pytest.raises(BackendUnavailable, match="--deterministic needs the attention back end native"):
        build(config(**small, deterministic=True))
    tiny_of("mistral", tmp_path / "mistral")
    small["model"] = str(tmp_path / "mistral")
    assert build(config(**small)).card.attention == "native"
