"""Other servers beside ours: the list, their lives, and the table."""

import argparse
import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.experiments.peer_servers import Peer, PeerBroken, memory_bytes, read_peers, running
from loadtest.experiments.peers import Load, Measures, as_document, take_turns
from tests.integration.system import wait_until
from tests.ports import free_port

FIGURES = Measures(
    start_s=8.0,
    memory_mb=1000.0,
    one_stream_tok_s=60.0,
    eight_streams_tok_s=240.0,
    prefill_tok_s=900.0,
    gap_p999_ms=50.0,
    gap_max_ms=80.0,
    late_share=0.001,
    prompt_ttft_s=2.0,
    errors=0,
)


def metronome(port: int) -> Peer:
    """A server of some tokens a second. It ends with its standard input, so a second process holds that open."""
    command = f"sleep 600 | {sys.executable} -m tests.loadtest.metronome --port {port} --gap-ms 5"
    return Peer(name="metronome", argv=("sh", "-c", command), port=port, ready_s=60.0)


def test_a_list_names_servers_with_the_environment_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS", "/opt/peers")
    file = tmp_path / "peers.toml"
    file.write_text('[[peer]]\nname = "a"\ncommand = "$PEERS/serve --name \'a b\'"\nport = 8101\nmodel = "m"\n')
    assert read_peers(file) == [Peer(name="a", argv=("/opt/peers/serve", "--name", "a b"), port=8101, model="m")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[[peer]]\nname = "a"\ncommand = "a"\n', "port"),
        ('[[peer]]\nname = "a"\ncommand = "a"\nport = 1\nprt = 2\n', "prt"),
        ('[[peer]]\nname = "legato"\ncommand = "a"\nport = 1\n', "two servers of one name"),
        ("peer =", "peers.toml"),
    ],
)
def test_a_list_that_is_none_is_refused_with_the_reason(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "peers.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_peers(file)


def test_a_server_is_started_loaded_and_gone_with_all_its_processes() -> None:
    server = metronome(free_port())
    with running(server) as (process, start_s):
        report = Load(server, tokenizer=None).run(users=2, requests=4, prompt_len=8, output_len=6)
        assert report["errors"] == 0
        assert report["requests"] == 4
        assert start_s > 0
        with pytest.raises(PeerBroken, match="is taken"), running(server):
            pass
    wait_until(lambda: not running_members(process.pid), 30, "all its processes to end")


def test_servers_are_measured_by_turns_and_one_that_breaks_has_no_more_of_them() -> None:
    early = Peer(name="early", argv=("sh", "-c", "exit 3"), port=free_port())
    options = argparse.Namespace(rounds=1, injections=1, prompt_len=50, every_s=0.5, tbt_target_ms=60.0, tokenizer=None)
    turns, broken = take_turns([metronome(free_port()), early], options)
    (figures,) = turns["metronome"]
    assert 50 < figures.one_stream_tok_s < 210, "at most a token every 5 ms"
    assert figures.eight_streams_tok_s > 2 * figures.one_stream_tok_s
    assert figures.errors == 0
    assert turns["early"] == []
    assert list(broken) == ["early"]
    assert "ended with 3" in broken["early"]


def running_members(group: int) -> list[int]:
    """Processes of a group, but for those that nobody has awaited yet."""
    members = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _parent, its_group = file.read_text().rsplit(")", 1)[1].split()[:3]
            if int(its_group) == group and state != "Z":
                members.append(int(file.parent.name))
    return members


def test_a_server_that_ends_or_never_answers_is_named() -> None:
    with (
        pytest.raises(PeerBroken, match="early ended with 3"),
        running(Peer(name="early", argv=("sh", "-c", "exit 3"), port=free_port())),
    ):
        pass
    with (
        pytest.raises(PeerBroken, match=r"mute is not ready after 0\.2 s"),
        running(Peer(name="mute", argv=("sleep", "600"), port=free_port(), ready_s=0.2)),
    ):
        pass
    with (
        pytest.raises(PeerBroken, match="absent"),
        running(Peer(name="absent", argv=("no-such-program",), port=free_port())),
    ):
        pass


def test_memory_is_that_of_a_process_and_all_below_it() -> None:
    code = "import sys; held = bytearray(80_000_000); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        of_child = memory_bytes(child.pid)
        assert 80e6 < of_child < 200e6
        assert memory_bytes(os.getpid()) > of_child
        child.communicate()


def test_ratios_are_above_one_where_ours_is_ahead() -> None:
    theirs = replace(FIGURES, one_stream_tok_s=30.0, gap_max_ms=400.0, start_s=4.0)
    options = argparse.Namespace(rounds=1, injections=6, prompt_len=1500, every_s=3.0, tbt_target_ms=60.0)
    table = as_document({"legato": FIGURES, "other": theirs}, 0.0, options)
    assert "| one stream, tokens/s | 60.0 | 30.0 (2.00) |" in table
    assert "| largest gap, ms | 80 | 400 (5.00) |" in table
    assert "| start, s | 8.0 | 4.0 (0.50) |" in table
