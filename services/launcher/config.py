"""Options of `legato up`."""

from dataclasses import dataclass
from typing import Literal

from common.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """The whole system on one machine. What is not here goes to the single processes through `--config FILE`, in their
    own tables, or through the environment."""

    host: str = option("127.0.0.1", "address of the public API")
    port: int = option(8000, "port of the public API")
    model: str = option("smollm2", "a model that `legato model pull` knows, a GGUF file or a Hugging Face directory")
    served_model_name: str | None = option(None, "what API clients call the model, if not as its files say")
    device: str = option(
        "cpu", "where workers compute: cpu, cuda (each on a GPU of its own), or simulated, which only takes its time"
    )
    profile: str | None = option(None, "device and model that simulated workers take the time of: a100-mistral-7b")
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "of weights and KV cache; auto asks the device")
    attention_backend: str = option("auto", "how workers compute attention; see `legato worker --help`")
    kernels: Literal["auto", "amx", "avx512bf16", "avx512", "avx2", "portable", "off"] = option(
        "auto",
        "instruction set of workers' native kernels; auto takes the machine's best, and torch if none can be built",
    )
    weights: Literal["dtype", "int8"] = option("dtype", "how workers keep weights: as dtype says, or in 8 bits")
    deterministic: bool = option(
        False, "workers refuse to start unless logits depend on neither neighbours nor chunking, to the bit"
    )
    workers: int = option(1, "GPU workers (or CPU ones)")
    tokenizers: int = option(1, "tokenizer processes")
    tp: int = option(1, "processes of each worker that share each layer (tensor parallelism)")
    pp: int = option(1, "stages of each worker, of some layers each (pipeline parallelism)")
    threads: int = option(0, "threads of each worker process; 0 shares the cores among them")
    tbt_target_ms: float = option(100.0, "the longest time between two tokens of a stream that is on time")
    policy: str = option("stall_free", "what runs next; see `legato scheduler --help`")
    token_budget: int = option(0, "tokens an iteration may compute; 0 derives it from the TBT target")
    depth: int = option(2, "plans in flight for each worker, 1 or 2, and one more for each stage beyond the first")
    kv_tokens: int = option(0, "size of each worker's KV pool in tokens; 0 chooses by the model and the memory")
    otlp_endpoint: str = option(
        "", "collector that takes spans by OTLP over HTTP, such as http://127.0.0.1:4318; none: no traces"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least level that is logged")
    log_format: Literal["json", "text"] = option("json", "json for machines, text for people")
    stop_timeout_s: float = option(30.0, "how long processes may take to end before they are killed")

    def __post_init__(self) -> None:
        for name in ("workers", "tokenizers", "tp", "pp"):
            if not 1 <= getattr(self, name) <= 64:
                raise ValueError(f"--{name} is {getattr(self, name)}; between 1 and 64 on one machine")
