"""Options of a tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from common.config import option
from common.process import ProcessConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig(ProcessConfig):
    """Where its neighbours are, whose tokens it speaks, and how much it takes on."""

    bind: str = option(help="address of the inbox that gateways dial, such as tcp://127.0.0.1:5600")
    scheduler: str = option(help="address that the scheduler binds for tokenizers, such as tcp://127.0.0.1:5610")
    model: str = option("smollm2", "a pulled model's name, a .gguf file, or a Hugging Face directory")
    chat_template: Path | None = option(None, "Jinja file to use instead of the model's own chat template")
    encode_threads: int = option(2, "threads that encode prompts, beside the event loop")
    max_open_requests: int = option(4096, "requests that may be open at a time; more are refused with a 429")
    max_waiting_encodes: int = option(1024, "prompts and calls that may wait for a thread; more are refused with a 429")
    max_rendered_chars: int = option(4_000_000, "characters that a chat may have once its template is filled in")

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)  # Not super(): a class with slots is a second class, unknown to super().
        for flag, value in (
            ("--encode-threads", self.encode_threads),
            ("--max-open-requests", self.max_open_requests),
            ("--max-waiting-encodes", self.max_waiting_encodes),
            ("--max-rendered-chars", self.max_rendered_chars),
        ):
            if value < 1:
                raise ValueError(f"{flag} is {value}; the least is 1")
