"""Each cause of a stall, provoked in real processes: it is named, and its milliseconds are found.

The device is simulated, so that its time is known; delays are injected where a process is to blame (docs/stalls.md).
Other work on the machine adds stalls of its own, so a test looks at the median of those with the cause it provoked.
"""

import concurrent.futures
import fcntl
import json
import socket
import statistics
import struct
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common.cost.load import Load
from gpu_worker.simulated.profiles import profile_named
from tests.gpu_worker.hf import smollm2_or_skip
from tests.integration.system import HTTP_TIMEOUT_S, System, running, wait_until

DELAY_MS = 400
TARGET_MS = 200.0
SITES = {"iteration": 23, "plan": 29, "text": 31, "write": 37, "step": 41}
"""Where a delay is injected, at every how many passages: primes, so that they seldom fall together."""
NUM_TOKENS = 150

PROFILE = "a100-llama2-70b-tp4"
"""30 ms for a decode: more than the noise of this machine, less than a test's patience."""
FULL_S = 0.5
"""Without another byte, after which a connection counts as full."""
SETTLE_S = 30.0
SHARE = 0.2
"""How far off what is found may be."""


@pytest.fixture(scope="module")
def delayed() -> Iterator[System]:
    """A system with a delay at every place, each at its own times."""
    smollm2_or_skip()
    delays = ",".join(f"{site}:{DELAY_MS}:{every}" for site, every in SITES.items())
    flags = ("--device", "simulated", "--profile", "a100-mistral-7b", "--tbt-target-ms", str(TARGET_MS))
    with running(*flags, environ={"LEGATO_INJECT_DELAY": delays, "LEGATO_MAX_STALL_LINES_PER_S": "1000"}) as system:
        list(system.stream(prompt="Hello", max_tokens=NUM_TOKENS, ignore_eos=True))
        yield system


@pytest.fixture(scope="module")
def cramped() -> Iterator[System]:
    """A system that reads prompts first, whatever streams wait, and has room for 40 blocks of KV."""
    smollm2_or_skip()
    flags = ("--device", "simulated", "--profile", PROFILE, "--policy", "prefill_first", "--kv-tokens", "640")
    environ = {"LEGATO_MAX_STALL_LINES_PER_S": "1000", "LEGATO_PREFIX_CACHE": "false"}
    with running(*flags, "--tbt-target-ms", str(TARGET_MS), environ=environ) as system:
        yield system


def stalls(system: System, *, cause: str = "") -> list[dict[str, Any]]:
    """Stalls logged so far, checked: each one's parts sum to its gap."""
    lines = system.log("stall")
    for line in lines:
        assert sum(round(part * 1e6) for part in line["parts_ms"].values()) == round(line["gap_ms"] * 1e6)
        assert line["gap_ms"] > line["target_ms"]
    return [line for line in lines if cause in ("", line["cause"])]


def wait_for_stalls(system: System, cause: str, num_stalls: int = 1) -> list[dict[str, Any]]:
    """The log is read by a thread of its own, so a line may be a moment late."""
    wait_until(
        lambda: len(stalls(system, cause=cause)) >= num_stalls,
        SETTLE_S,
        f"{num_stalls} stalls by {cause}",
        lambda: "\n".join(json.dumps(line) for line in stalls(system)),
    )
    return stalls(system, cause=cause)


def part_of(lines: list[dict[str, Any]], part: str) -> float:
    """The median of a part, in milliseconds."""
    return float(statistics.median(line["parts_ms"][part] for line in lines))


@pytest.mark.parametrize(
    ("cause", "site"),
    [
        ("device_slow", "iteration"),
        ("plan_wait", "plan"),
        ("scheduler_lag", "step"),
        ("detokenizer_lag", "text"),
        ("gateway_lag", "write"),
    ],
)
def test_an_injected_delay_is_found_where_it_was_injected(delayed: System, cause: str, site: str) -> None:
    found = wait_for_stalls(delayed, cause, max(1, NUM_TOKENS // SITES[site] // 3))
    assert part_of(found, cause) == pytest.approx(DELAY_MS, rel=SHARE)


def test_a_client_that_does_not_read_is_the_cause_of_its_own_gaps() -> None:
    """Its time begins when the connection is full; sixteen choices on a fast device soon fill what lies between."""
    smollm2_or_skip()
    slept_s = 3.0
    body = {
        "model": "smollm2",
        "prompt": "Hello",
        "n": 16,
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    data = json.dumps(body).encode()
    flags = ("--device", "simulated", "--profile", "h200-smollm2", "--tbt-target-ms", "1000")
    with running(*flags) as system, socket.socket() as connection:
        connection.settimeout(HTTP_TIMEOUT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", system.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: legato\r\nContent-Length: {len(data)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        received = connection.recv(4096)
        assert received.startswith(b"HTTP/1.1 200")
        full_since = wait_until_full(connection)
        time.sleep(slept_s)
        injected_ms = 1e3 * (time.monotonic() - full_since)
        while b"data: [DONE]" not in received[-64:]:
            piece = connection.recv(1 << 20)
            assert piece, "the gateway closed the connection"
            received = received[-64:] + piece
        found = wait_for_stalls(system, "slow_client", 16)
    assert part_of(found, "slow_client") == pytest.approx(injected_ms, rel=SHARE)


def wait_until_full(connection: socket.socket) -> float:
    """Until nothing more comes to lie in the connection: since when, by the monotonic clock."""
    size, since = -1, time.monotonic()
    while time.monotonic() - since < FULL_S:
        now_size = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, b"\0" * 4))[0]
        if now_size != size:
            size, since = now_size, time.monotonic()
        time.sleep(0.02)
    return since


def test_prompts_that_run_before_streams_interfere_and_are_named(cramped: System) -> None:
    before, prompt_len = len(stalls(cramped, cause="prefill_interference")), 400
    with concurrent.futures.ThreadPoolExecutor() as pool:
        stream = cramped.stream(prompt="Hello", max_tokens=200, ignore_eos=True, slo={"tbt_ms": 80})
        next(stream)
        reading = pool.submit(cramped.complete, [7] * prompt_len, max_tokens=1)
        for _ in stream:
            pass
        reading.result()
    cramped.wait_idle()
    (found,) = wait_for_stalls(cramped, "prefill_interference", before + 1)[before:]
    load = Load()
    load.add_chunk(0, prompt_len, is_sampled=True)
    assert found["parts_ms"]["prefill_interference"] == pytest.approx(
        profile_named(PROFILE).roofline.time_ns(load) / 1e6, rel=SHARE
    )
    (culprit,) = found["culprits"]
    assert culprit["num_tokens"] == prompt_len
    assert culprit["ms"] == found["parts_ms"]["prefill_interference"]

    def ends() -> list[dict[str, Any]]:
        return [line for line in cramped.log("request_finished") if line["request_id"] == culprit["request_id"]]

    wait_until(lambda: len(ends()) == 2, SETTLE_S, "the culprit's end, told by gateway and scheduler", cramped.describe)
    assert {line["num_prompt_tokens"] for line in ends()} == {prompt_len}
    cramped.wait_idle()


def test_a_device_that_is_too_slow_for_the_target_is_over_capacity(cramped: System) -> None:
    before = len(stalls(cramped, cause="over_capacity"))
    list(cramped.stream(prompt="Hello", max_tokens=60, ignore_eos=True, slo={"tbt_ms": 10}))
    found = wait_for_stalls(cramped, "over_capacity", before + 30)[before:]
    load = Load()
    load.add_decodes(1, 12)
    assert part_of(found, "decode") == pytest.approx(profile_named(PROFILE).roofline.time_ns(load) / 1e6, rel=SHARE)
    cramped.wait_idle()


def test_streams_without_blocks_wait_for_kv_or_are_preempted(cramped: System) -> None:
    """Three streams that grow beyond the pool: one that needs a block while the newest runs sits an iteration out, and
    the newest gives way until there is room again."""
    gaps: dict[int, list[float]] = {}

    def read(index: int) -> None:
        gaps[index] = []
        last_s = 0.0
        prompt = [index + 10] * 140
        for _ in cramped.stream(prompt=prompt, max_tokens=90, ignore_eos=True, slo={"tbt_ms": 45}):
            now_s = time.monotonic()
            gaps[index].append(1e3 * (now_s - last_s) if last_s else 0.0)
            last_s = now_s

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(read, range(3)))
    preempted = wait_for_stalls(cramped, "preemption")
    longest_ms = max(gap for of_stream in gaps.values() for gap in of_stream)
    assert max(line["parts_ms"]["preemption"] for line in preempted) == pytest.approx(longest_ms, rel=SHARE)
    assert all(line["num_recomputed_tokens"] >= 140 for line in preempted)
    waited = wait_for_stalls(cramped, "kv_wait")
    load = Load()
    load.add_decodes(2, 2 * 180)
    iteration_ms = profile_named(PROFILE).roofline.time_ns(load) / 1e6
    assert part_of(waited, "kv_wait") == pytest.approx(iteration_ms, rel=SHARE)
    cramped.wait_idle()
