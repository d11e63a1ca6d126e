"""Options of the gateway."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from common.config import option
from common.process import ProcessConfig
from common.wire.codec import MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ProcessConfig):
    """Who may ask, how much at a time, and how long anything may take."""

    host: str = option("127.0.0.1", "address of the public HTTP port")
    port: int = option(8000, "public HTTP port; 0 takes a free one and logs it")
    tokenizers: tuple[str, ...] = option(
        help="addresses that tokenizers bind, such as tcp://127.0.0.1:5600; a name stands for all it resolves to",
        metavar="ADDRESS,…",
    )
    resolve_interval_s: float = option(5.0, "pause between two look-ups of the tokenizers' host names")

    api_keys: tuple[str, ...] = option((), "keys that clients may use; with none, and no file, everybody may ask")
    api_keys_file: Path | None = option(None, "file with one API key a line; blank lines and # comments are skipped")

    scheduler_admin: tuple[str, ...] = option(
        (),
        "admin ports of schedulers, such as http://127.0.0.1:9100, for /console; with none, it shows streams alone",
        metavar="URL,…",
    )

    max_connections: int = option(4096, "HTTP connections at a time; one more gets a 503 and is closed")
    max_open_requests: int = option(2048, "completions at a time, over all clients; more get a 429")
    max_body_bytes: int = option(4 * 1024 * 1024, "largest request body; a larger one gets a 413")
    max_prompts: int = option(64, "prompts in one call")
    max_choices: int = option(16, "n: choices per prompt")
    retry_after_s: float = option(1.0, "what Retry-After says where nothing better is known")

    first_request_timeout_s: float = option(30.0, "time for a new connection to send a request; then it is closed")
    body_timeout_s: float = option(30.0, "time for a request's body to arrive; then 408")
    queue_timeout_s: float = option(10.0, "time for the ring to queue or reject a request; then 503")
    call_timeout_s: float = option(30.0, "time for an answer to /tokenize or /detokenize; then 503")
    silence_timeout_s: float = option(600.0, "time a queued or running call may hear nothing from the ring; then 503")
    keep_alive_s: float = option(75.0, "time an idle HTTP connection stays open")
    heartbeat_s: float = option(10.0, "silence on a stream after which an SSE comment keeps proxies patient")
    send_timeout_s: float = option(20.0, "time a client may leave its full connection unread; then it is cut off")
    max_unsent_bytes: int = option(
        256 * 1024, "text that may wait for a client that reads slowly; beyond it the client is cut off"
    )
    drain_s: float = option(20.0, "time for open requests to finish once the process is asked to stop")

    max_stall_lines_per_s: int = option(20, "stalls that are logged in one second; all are counted")
    stall_above_ms: float = option(
        0.0, "gaps that count as stalls, whatever a stream's target; 0: its target", is_hidden=True
    )

    interactive_tbt_ms: float = option(50.0, "time between tokens that slo.class interactive asks for")
    batch_tbt_ms: float = option(1000.0, "time between tokens that slo.class batch asks for")

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is a second class, which a bare super() does not find.
        ProcessConfig.__post_init__(self)
        if not self.tokenizers:
            raise ValueError("--tokenizers is empty; a gateway needs at least one address")
        for address in self.tokenizers:
            if not _is_address(address):
                raise ValueError(f"--tokenizers has {address!r}; an address is tcp://HOST:PORT or ipc://PATH")
        for url in self.scheduler_admin:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"--scheduler-admin has {url!r}; an address is http://HOST:PORT")
        if not 0 < self.max_body_bytes <= MAX_MESSAGE_BYTES // 2:
            raise ValueError(
                f"--max-body-bytes is {self.max_body_bytes}; the links carry at most {MAX_MESSAGE_BYTES // 2}"
            )
        if self.max_choices > self.max_open_requests:
            raise ValueError(
                f"--max-choices {self.max_choices} can never be served with "
                f"--max-open-requests {self.max_open_requests}"
            )
        for name in (
            *("resolve_interval_s", "max_connections", "max_open_requests", "max_prompts", "max_choices"),
            *(
                "first_request_timeout_s",
                "body_timeout_s",
                "queue_timeout_s",
                "call_timeout_s",
                "silence_timeout_s",
                "keep_alive_s",
            ),
            *("heartbeat_s", "send_timeout_s", "max_unsent_bytes", "interactive_tbt_ms", "batch_tbt_ms"),
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")
        if self.drain_s < 0:
            raise ValueError(f"--drain-s is {self.drain_s}; it must not be below 0")


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return (
            bool(parts.path) if parts.scheme == "ipc" else parts.scheme == "tcp" and bool(parts.hostname and parts.port)
        )
    except ValueError:  # A port that is no number.
        return False


def read_api_keys(config: GatewayConfig) -> tuple[str, ...]:
    """Return all keys that the configuration names.

    Raises:
        OSError: If the file cannot be read, or names no key: an empty file must not open the door to everybody.
    """
    if config.api_keys_file is None:
        return config.api_keys
    lines = (line.strip() for line in config.api_keys_file.read_text(encoding="utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise OSError(f"--api-keys-file {config.api_keys_file} holds no key")
    return (*config.api_keys, *keys)
