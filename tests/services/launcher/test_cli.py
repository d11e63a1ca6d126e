"""The `legato` command, as a shell sees it."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest


def legato(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.launcher.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environ},
    )


def test_help_names_every_command() -> None:
    result = legato("--help")
    assert result.returncode == 0
    for command in ("up", "gateway", "tokenizer", "scheduler", "worker", "model pull", "keys new", "load", "version"):
        assert command in result.stdout


@pytest.mark.parametrize("command", ["up", "gateway", "tokenizer", "scheduler", "worker"])
def test_each_process_explains_its_options(command: str) -> None:
    result = legato(command, "--help")
    assert result.returncode == 0, result.stderr
    assert "--config" in result.stdout
    assert "--log-level" in result.stdout


def test_an_unknown_command_is_named() -> None:
    result = legato("upp")
    assert result.returncode == 2
    assert "'upp'" in result.stderr


def test_version_says_which_protocol() -> None:
    assert "link protocol 1.0" in legato("version").stdout


def test_new_keys_are_for_their_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "ring.toml"
    assert legato("keys", "new", str(file)).returncode == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    content = file.read_text()
    again = legato("keys", "new", str(file))
    assert again.returncode == 1
    assert str(file) in again.stderr
    assert file.read_text() == content


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("scheduler", ["--bind", "tcp://0.0.0.0:5600"]),
        ("gateway", ["--tokenizers", "tcp://10.1.2.3:5600", "--port", "0"]),
    ],
)
def test_a_link_beyond_loopback_is_refused_without_keys(command: str, flags: list[str]) -> None:
    result = legato(command, *flags)
    assert result.returncode == 2
    assert "legato keys new" in result.stderr


def test_a_key_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ring.toml"
    file.write_text("nonsense = 1\n")
    result = legato("scheduler", "--keys", str(file))
    assert result.returncode == 2
    assert "public" in result.stderr


def test_a_model_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    result = legato("up", "--model", "smollm2", LEGATO_MODELS=str(tmp_path))
    assert result.returncode == 2
    assert "legato model pull smollm2" in result.stderr


def test_options_come_from_the_environment_and_a_file_too(tmp_path: Path) -> None:
    assert "--policy" in legato("scheduler", LEGATO_POLICY="nonsense").stderr
    file = tmp_path / "legato.toml"
    file.write_text('[scheduler]\npolicy = "nonsense"\n')
    assert "nonsense" in legato("scheduler", "--config", str(file)).stderr
