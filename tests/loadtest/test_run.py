"""Whole runs against a foreign server: what is sent, what is counted, what is written."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.cli import main
from loadtest.drive import Driver, RunPlan
from loadtest.options import LoadOptions, options_from
from loadtest.run import RunOptions
from loadtest.single import run_loop
from loadtest.summary import report_of
from loadtest.workload import RequestClass, pairs_of
from tests.loadtest.fake_server import FakeServer, Script, count_tokens
from tests.loadtest.worlds import NUM_TRY_OUT_REQUESTS, measured, outcome_of, read, server_beside

CLASSES = (RequestClass(name="default", lengths=pairs_of("1", "1"), ttft_target_ms=60_000, tbt_target_ms=60_000),)
KEYS = [
    *("valid", "requests", "errors", "ttft_ms", "tbt_ms", "max_gap_ms", "tpot_ms", "e2e_ms", "stalls"),
    *("throughput_tok_s", "goodput_rps", "detail"),
]


def report(server: FakeServer, **options: Any) -> dict[str, Any]:
    return report_of(outcome_of(server, arrivals="constant", **{"rate": 100.0, "requests": 6, **options}), CLASSES, {})


def test_prompts_have_the_length_that_the_server_counts() -> None:
    server = FakeServer()
    found = report(server, prompt_len="uniform:5:90")

    sent = [count_tokens(seen.body["prompt"]) for seen in server.seen[NUM_TRY_OUT_REQUESTS:]]
    assert min(sent) >= 5
    assert len(set(sent)) > 1
    assert found["detail"]["token_counts"]["prompts_of_other_length"] == 0


def test_a_server_without_tokenize_gets_words_on_trust_and_the_report_counts_what_differs() -> None:
    server = FakeServer()
    server.has_tokenize = False
    found = report(server, prompt_len="30")

    assert found["detail"]["token_counts"]["prompts_of_other_length"] == 6  # this server adds one, and splits words


def test_output_lengths_are_forced_where_the_server_allows_it() -> None:
    server = FakeServer()
    report(server, output_len="7")

    for seen in server.seen[NUM_TRY_OUT_REQUESTS:]:
        assert (seen.body["max_tokens"], seen.body["min_tokens"], seen.body["ignore_eos"]) == (7, 7, True)


@pytest.mark.parametrize("refused", [{"min_tokens"}, {"ignore_eos"}, {"ignore_eos", "min_tokens", "stream_options"}])
def test_what_a_server_refuses_is_not_sent_again(refused: set[str]) -> None:
    server = FakeServer()
    server.refused_fields = refused
    found = report(server)

    assert found["errors"] == 0
    assert all(not refused & set(seen.body) for seen in server.seen[-6:])


def test_without_usage_chunks_are_measured_and_tokens_are_said_to_be_unknown() -> None:
    found = report(FakeServer(lambda body: Script(has_usage=False, gaps_s=(0.002,))))

    assert found["tbt_ms"]["p50"] is None
    assert found["detail"]["chunk_gap_ms"]["p50"] is not None
    assert found["detail"]["token_counts"]["requests_with_unknown_tokens"] == 6


def test_tokens_that_come_together_count_as_tokens_and_their_chunks_as_chunks() -> None:
    found = report(FakeServer(lambda body: Script(num_events=4, usage_tokens=12, gaps_s=(0.002,))), output_len="12")

    counts = found["detail"]["token_counts"]
    assert (counts["tokens_per_chunk"], counts["output_tokens"]) == (3.0, 72)
    assert found["tbt_ms"]["p50"] == 0.0  # eight of eleven gaps
    assert found["detail"]["chunk_gap_ms"]["p50"] > 0.0
    assert found["tbt_ms"]["max"] == found["detail"]["chunk_gap_ms"]["max"]


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (Script(status=429, error={"code": "rate_limited", "message": "no"}), "http_429:rate_limited"),
        (Script(status=500, error={"type": "server_error"}), "http_500:server_error"),
        (Script(break_after=0), "disconnected"),
        (Script(break_after=2), "disconnected"),
        (Script(error_after=2), "server_error"),
        (Script(first_s=30.0), "timeout"),
        (Script(texts=("", "", "", "", ""), has_usage=False), "no_tokens"),
    ],
)
def test_errors_are_counted_by_kind_and_kept_out_of_the_latencies(script: Script, kind: str) -> None:
    num_seen = iter(range(1000))

    def script_of(body: dict[str, Any]) -> Script:
        return script if next(num_seen) % 2 == 1 else Script()

    # Long enough for all others, on a busy machine too.
    found = report(FakeServer(script_of), request_timeout_s=2.0 if kind == "timeout" else 60.0, requests=6)

    assert (found["requests"], found["errors"]) == (6, 3)
    assert found["detail"]["errors_by_kind"] == {kind: 3}
    assert found["valid"] or found["detail"]["invalid_because"]


def test_a_stream_that_breaks_off_in_a_silence_counts_that_as_a_stall() -> None:
    num_seen = iter(range(1000))

    def script_of(body: dict[str, Any]) -> Script:
        hangs = next(num_seen) == NUM_TRY_OUT_REQUESTS
        return Script(gaps_s=(0.0, 0.0, 60.0)) if hangs else Script()

    outcome = outcome_of(FakeServer(script_of), arrivals="constant", rate=50.0, requests=3, request_timeout_s=2.0)
    strict = RequestClass(name="default", lengths=pairs_of("1", "1"), tbt_target_ms=300)

    found = report_of(outcome, (strict,), {})
    assert found["detail"]["errors_by_kind"] == {"timeout": 1}
    assert found["stalls"] >= 1


def test_goodput_counts_only_what_met_both_targets() -> None:
    def script_of(body: dict[str, Any]) -> Script:
        match body["max_tokens"]:
            case 11:
                return Script(first_s=2.0)  # misses the TTFT target
            case 12:
                return Script(gaps_s=(0.0, 2.0, 0.0))  # stalls once
        return Script()

    outcome = outcome_of(
        FakeServer(script_of), arrivals="constant", rate=100.0, requests=60, output_len="choice:10,11,12"
    )
    strict = RequestClass(name="default", lengths=pairs_of("1", "1"), ttft_target_ms=1500, tbt_target_ms=1500)
    found = report_of(outcome, (strict,), {})
    number = {length: sum(r.output_len == length for r in measured(outcome)) for length in (10, 11, 12)}

    assert found["stalls"] == number[12] > 0
    assert found["goodput_rps"] == pytest.approx(number[10] / 0.6, rel=1e-3)


def test_users_of_a_closed_loop_never_have_two_requests_at_once() -> None:
    server = FakeServer(lambda body: Script(first_s=0.01))
    outcome = outcome_of(server, arrivals="closed", users=3, requests=12, drain_s=5.0)

    events = [(r.sent_ns, 1) for r in outcome.records] + [(r.ended_ns, -1) for r in outcome.records]
    in_flight, most = 0, 0
    for _, change in sorted(events):
        in_flight += change
        most = max(most, in_flight)
    assert most == 3
    assert len(measured(outcome)) == 12


def test_a_conversation_sends_what_was_said_before() -> None:
    server = FakeServer()
    outcome = outcome_of(
        server, arrivals="constant", rate=50.0, requests=2, endpoint="chat", turns="3", think_time_s=0.01
    )
    talks = [seen.body["messages"] for seen in server.seen[NUM_TRY_OUT_REQUESTS:]]
    longest = max(talks, key=len)

    assert sorted(len(talk) for talk in talks) == [1, 1, 3, 3, 5, 5]
    assert [message["role"] for message in longest] == ["user", "assistant", "user", "assistant", "user"]
    assert longest[1]["content"] == " w0 w1 w2 w3 w4"
    assert sum(longest[:3] == talk for talk in talks) == 1
    assert sorted(record.turn for record in measured(outcome)) == [0, 0, 1, 1, 2, 2]


def test_a_share_of_each_prompt_is_common_to_all() -> None:
    server = FakeServer()
    outcome_of(server, arrivals="constant", rate=100.0, requests=4, prompt_len="41", prefix_share=0.5)
    words = [seen.body["prompt"].split() for seen in server.seen[NUM_TRY_OUT_REQUESTS:]]

    assert len({tuple(prompt[:20]) for prompt in words}) == 1
    assert len({tuple(prompt[20:32]) for prompt in words}) == 4


def test_ids_are_sent_as_ids() -> None:
    server = FakeServer()
    outcome_of(server, rate=100.0, requests=2, prompt_kind="ids", vocab_size=5000, prompt_len="33")
    prompt = server.seen[-1].body["prompt"]

    assert len(prompt) == 33
    assert all(1000 <= token_id < 5000 for token_id in prompt)


def test_a_mix_sends_each_class_its_share_with_its_own_fields(tmp_path: Path) -> None:
    mix = tmp_path / "mix.toml"
    mix.write_text(
        '[[class]]\nname = "chat"\nshare = 3\nprompt_len = 10\noutput_len = 4\nbody = {slo = "interactive"}\n'
        '[[class]]\nname = "batch"\nshare = 1\nprompt_len = 50\noutput_len = 9\ntbt_target_ms = 1000.0\n'
    )
    server = FakeServer()
    outcome = outcome_of(server, arrivals="constant", rate=400.0, requests=80, mix=mix)
    classes = LoadOptions(mix=mix).classes(None)
    found = report_of(outcome, classes, {})["detail"]["classes"]

    assert found["chat"]["requests"] + found["batch"]["requests"] == 80
    assert 45 <= found["chat"]["requests"] <= 75
    for seen in server.seen[NUM_TRY_OUT_REQUESTS:]:
        is_chat = seen.body["max_tokens"] == 4
        assert ("slo" in seen.body) == is_chat
        assert count_tokens(seen.body["prompt"]) == (10 if is_chat else 50)


def test_a_replayed_trace_sends_each_row_at_its_time_with_its_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrived_at_ms,num_prefill_tokens,num_decode_tokens\n0,10,2\n30,20,3\n40,30,4\n100,40,5\n")
    outcome = outcome_of(FakeServer(), arrivals="trace", trace=str(trace), requests=4)

    rows = [(r.scheduled_ns - outcome.start_ns, r.prompt_len, r.output_len) for r in measured(outcome)]
    assert rows == [(0, 10, 2), (30_000_000, 20, 3), (40_000_000, 30, 4), (100_000_000, 40, 5)]


def test_a_run_that_is_stopped_reports_what_it_has_and_is_not_valid() -> None:
    async def world() -> Any:
        async with FakeServer().serving() as server:
            options = LoadOptions(base_url=server.url, arrivals="constant", rate=50.0, prompt_len="20", output_len="2")
            async with options.client() as client:
                dialect, prompts = await options.meet(client)
                driver = Driver(client, dialect, prompts, RunPlan(num_measured=100_000))
                stopping = asyncio.create_task(stop_after_some(server, driver))
                outcome = await driver.open_loop(options.planned(options.classes(None), None))
                await stopping
                return outcome

    async def stop_after_some(server: FakeServer, driver: Driver) -> None:
        await server.has_seen(NUM_TRY_OUT_REQUESTS + 4)
        driver.stop()

    found = report_of(run_loop(world()), CLASSES, {})
    assert found["requests"] >= 4
    assert "interrupted" in found["detail"]["invalid_because"]


def test_the_command_writes_its_reports_and_no_text_in_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(texts=tuple(f"secret{i}" for i in range(6)), gaps_s=(0.003,))
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "jsonl", "html")}
    with server_beside(lambda body: script if body["max_tokens"] == 6 else Script()) as server:
        status = main(
            [
                *("run", "--base-url", server.url + "/v1", "--rate", "100", "--requests", "10", "--prompt-len", "20"),
                *("--output-len", "6", "--startup-s", "0.05", "--progress", "false"),
                *(word for kind, path in files.items() for word in (f"--{kind}", str(path))),
            ]
        )
        prompts = [seen.body["prompt"] for seen in server.seen]

    found = read(files["json"])
    assert list(found) == KEYS
    for metric in ("ttft_ms", "tbt_ms", "max_gap_ms", "tpot_ms", "e2e_ms"):
        assert list(found[metric]) == ["p50", "p90", "p99", "p999", "max"]
    assert (found["requests"], found["errors"]) == (10, 0)
    assert status == (0 if found["valid"] else 1)
    lines = [json.loads(line) for line in files["jsonl"].read_text().splitlines()]
    assert sum(line["measured"] for line in lines) == 10
    assert all(len(line["chunks_ms"]) == 6 for line in lines if line["measured"])
    page = files["html"].read_text()
    assert page.count("<svg") == 4
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing is loaded from anywhere
    texts = [*(path.read_text() for path in files.values()), *capsys.readouterr()]
    assert not any("secret" in text or prompt in text for text in texts for prompt in prompts)


def test_several_processes_share_one_load(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    with server_beside() as server:
        status = main(
            [
                *("run", "--base-url", server.url, "--rate", "60", "--requests", "30", "--prompt-len", "20"),
                *("--output-len", "3", "--startup-s", "0", "--processes", "2", "--json", str(file)),
                *("--progress", "false"),
            ]
        )
        num_prompts = len({seen.body["prompt"] for seen in server.seen})

    found = read(file)
    assert status in (0, 1)  # a busy machine may make the generator late, and then it says so
    assert (found["requests"], found["errors"]) == (30, 0)
    assert num_prompts == 30 + NUM_TRY_OUT_REQUESTS + found["detail"]["requests_around_window"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rate", "0"], "--rate"),
        (["--requests", "5", "--duration", "3"], "--duration"),
        (["--arrivals", "trace"], "--trace"),
        (["--arrivals", "sometimes"], "--arrivals"),
        (["--prompt-len", "many"], "'many'"),
        (["--prefix-share", "1.5"], "--prefix-share"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--base-url", "ftp://x"], "ftp://x"),
        (["--endpoint", "chat", "--prompt-kind", "ids"], "--prompt-kind"),
        (["--trace", "nothing.csv"], "nothing.csv"),
        (["--mix", "nothing.toml"], "nothing.toml"),
        (["--tokenizer", "nothing.json"], "nothing.json"),
    ],
)
def test_a_wrong_option_ends_with_a_message_that_names_it(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server_beside() as server:
        status = main(["run", "--base-url", server.url, *flags])

    assert status == 2
    assert named in capsys.readouterr().err


def test_a_server_that_is_not_there_ends_the_command_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--base-url", "http://127.0.0.1:9", "--requests", "1"]) == 2
    assert "connect_failed" in capsys.readouterr().err


def test_of_the_environment_only_the_key_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_API_KEY", "k")
    monkeypatch.setenv("LEGATO_MODEL", "a-server-setting")

    options = options_from(RunOptions, "run", [])

    assert (options.api_key, options.model) == ("k", "")


def test_the_commands_are_told_when_none_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "legato load COMMAND" in capsys.readouterr().out
