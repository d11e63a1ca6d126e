"""Options of a worker."""

from dataclasses import dataclass
from typing import Literal

from common.config import option
from common.process import ProcessConfig
from gpu_worker.simulated.profiles import profile_named
from gpu_worker.slots import DEFAULT_BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ProcessConfig):
    """Where the scheduler is, which model to run, and how much of this machine to use for it."""

    scheduler: str = option(help="address that the scheduler binds for workers, such as tcp://127.0.0.1:5610")
    model: str = option("smollm2", "a pulled model's name, a .gguf file, or a Hugging Face directory")
    served_model_name: str | None = option(None, "what API clients call the model (default: its own name)")
    device: Literal["cpu", "cuda", "simulated"] = option(
        "cpu", "device that runs the model; simulated only takes its time"
    )
    device_index: int = option(0, "which CUDA device; the ranks that this process starts take the next ones")
    profile: str | None = option(
        None, "which device and model a simulated one takes the time of, such as a100-mistral-7b"
    )
    simulated_output_len: int = option(
        0, "mean output tokens after which a simulated model ends by itself; 0: never, requests end at max_tokens"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "of weights and KV cache; auto is bfloat16 where the device multiplies it natively, else float32"
    )
    max_model_len: int = option(0, "tokens of prompt and output together; 0 takes what the model was trained for")
    kv_tokens: int = option(
        0, "size of the KV pool in tokens; 0 holds 3 requests of full length, memory permitting, or on CUDA what fits"
    )
    block_size: int = option(0, "tokens per KV block; 0 takes what the attention back end likes best, mostly 16")
    max_num_slots: int = option(256, "requests that may be resident at a time")
    max_chunk_tokens: int = option(2048, "tokens that one iteration may compute, decodes included")
    max_queued_plans: int = option(64, "plans that may wait for the device; a scheduler that sends more is cut off")
    attention_backend: Literal["auto", "native", "cpu", "reference", "flash_attn", "fa3", "fa2", "triton", "torch"] = (
        option(
            "auto",
            "which kernels to use: native ones for the whole model, or torch with cpu or reference attention; on CUDA "
            "flash_attn (fa3 or fa2), triton, or torch, which only compares",
        )
    )
    attention_calls: Literal["split", "one"] = option(
        "split", "attention of decodes and of chunks in two calls, or all in one (CUDA)"
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "where weights come from; dummy draws them at random for any config.json"
    )
    gpu_memory_share: float = option(0.9, "of a GPU's memory, what this worker may take, weights and all")
    eager: bool = option(False, "compute decode batches without CUDA graphs: starts sooner, decodes more slowly")
    kernels: Literal["auto", "amx", "avx512bf16", "avx512", "avx2", "portable", "off"] = option(
        "auto", "instruction set of the native kernels; auto takes the machine's best, and torch if none can be built"
    )
    weights: Literal["dtype", "int8"] = option(
        "dtype", "how weights are kept: as dtype says, or in 8 bits (native only)"
    )
    deterministic: bool = option(
        False,
        "refuse to start unless logits depend on neither neighbours nor chunking, to the bit: native kernels on a CPU, "
        "triton ones on CUDA, more slowly",
    )
    threads: int = option(0, "CPU threads of the model; 0 takes every core that this process may run on")
    iteration_trace_share: float = option(
        0.01, "of the iterations that took part in no stall, how many have a span, where spans are exported"
    )
    tp: int = option(1, "processes that share each layer (tensor parallelism)")
    pp: int = option(1, "stages of layers, one behind the other (pipeline parallelism)")
    rank: int | None = option(
        None, "which of tp * pp processes this is, where an operator starts each; absent starts all on this machine"
    )
    rank_address: str | None = option(
        None, "where rank 0 binds for the others, such as tcp://10.0.0.1:5700; needed with --rank"
    )
    rank_timeout_s: float = option(120.0, "how long ranks wait for each other in one iteration before they give up")
    rank_start_timeout_s: float = option(600.0, "how long rank 0 waits for the others to load their parts")
    profile_seconds: float = option(2.0, "time for measuring iterations at start-up, more or less")

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)  # Not super(): a class with slots is a second class, unknown to super().
        for flag, value, least in (
            ("--max-model-len", self.max_model_len, 0),
            ("--kv-tokens", self.kv_tokens, 0),
            ("--block-size", self.block_size, 0),
            ("--device-index", self.device_index, 0),
            ("--max-num-slots", self.max_num_slots, 1),
            ("--max-queued-plans", self.max_queued_plans, self.pp + 1),
            ("--threads", self.threads, 0),
            ("--simulated-output-len", self.simulated_output_len, 0),
            ("--tp", self.tp, 1),
            ("--pp", self.pp, 1),
        ):
            if value < least:
                raise ValueError(f"{flag} is {value}; the least is {least}")
        if self.max_chunk_tokens < self.max_num_slots:
            # An iteration must have room for a decode of every resident request.
            raise ValueError(
                f"--max-chunk-tokens is {self.max_chunk_tokens}, less than --max-num-slots, {self.max_num_slots}"
            )
        block_size = self.block_size or DEFAULT_BLOCK_SIZE
        if 0 < self.kv_tokens < block_size:
            raise ValueError(f"--kv-tokens is {self.kv_tokens}, less than one block of --block-size {block_size}")
        if (self.device == "simulated") != (self.profile is not None):
            raise ValueError(f"--device is {self.device}, --profile {self.profile}: one needs the other")
        if self.profile is not None:
            profile_named(self.profile)
        if not 0 <= self.iteration_trace_share <= 1:
            raise ValueError(f"--iteration-trace-share is {self.iteration_trace_share:g}; it must lie between 0 and 1")
        for flag, seconds in (
            ("--profile-seconds", self.profile_seconds),
            ("--rank-timeout-s", self.rank_timeout_s),
            ("--rank-start-timeout-s", self.rank_start_timeout_s),
        ):
            if not seconds > 0:
                raise ValueError(f"{flag} is {seconds:g}; it must be above 0")
        if not 0 < self.gpu_memory_share < 1:
            raise ValueError(f"--gpu-memory-share is {self.gpu_memory_share:g}; it must be between 0 and 1")
        if self.device == "cuda" and self.deterministic and self.attention_backend not in ("auto", "triton"):
            raise ValueError(
                "--deterministic true on --device cuda needs --attention-backend triton; "
                f"it is {self.attention_backend}"
            )
        self._check_ranks()

    @property
    def num_ranks(self) -> int:
        """Processes that this worker consists of."""
        return self.tp * self.pp

    def _check_ranks(self) -> None:
        if self.rank is not None and not 0 <= self.rank < self.num_ranks:
            raise ValueError(
                f"--rank is {self.rank}; --tp {self.tp} and --pp {self.pp} make ranks 0 to {self.num_ranks - 1}"
            )
        if self.rank is not None and self.rank_address is None:
            raise ValueError(f"--rank is {self.rank}, which needs --rank-address")
        if self.num_ranks == 1:
            return
        is_cuda = self.device == "cuda"
        for flag, value, served in (
            ("--device", self.device, ("cpu", "cuda")),
            (
                "--attention-backend",
                self.attention_backend,
                ("auto", *(("flash_attn", "fa3", "fa2", "triton", "torch") if is_cuda else ("cpu", "reference"))),
            ),
            ("--weights", self.weights, ("dtype",)),
            ("--deterministic", self.deterministic, (False,)),
            ("--load-format", self.load_format, ("auto", "dummy") if is_cuda else ("auto",)),
        ):
            if value not in served:
                raise ValueError(
                    f"{flag} is {value}, which several ranks (--tp {self.tp}, --pp {self.pp}) do not serve"
                )
