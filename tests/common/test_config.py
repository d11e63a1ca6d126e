"""Where options come from, and what is said of bad ones."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from common.config import ConfigError, add_options, flags_of, load, option


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    bind: str = option(help="where")
    depth: int = option(2, "plans")
    target_ms: float = option(100.0, "target")
    peers: tuple[str, ...] = option((), "others")
    keys: Path | None = option(None, "file")
    level: Literal["info", "debug"] = option("info", "level")
    is_on: bool = option(False, "switch")

    def __post_init__(self) -> None:
        if self.depth > self.target_ms:
            raise ValueError(f"--depth {self.depth} is above --target-ms {self.target_ms}")


def config_of(argv: list[str], environ: dict[str, str] | None = None) -> Config:
    parser = argparse.ArgumentParser()
    add_options(parser, Config)
    return load(Config, "scheduler", vars(parser.parse_args(argv)), environ or {})


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "legato.toml"
    file.write_text('[scheduler]\nbind = "file"\ndepth = 3\ntarget_ms = 50\nlevel = "debug"\n[worker]\nanything = 1\n')
    config = config_of(["--config", str(file), "--bind", "flag"], {"LEGATO_BIND": "environment", "LEGATO_DEPTH": "7"})

    assert (config.bind, config.depth, config.target_ms, config.level, config.is_on) == (
        "flag",
        7,
        50.0,
        "debug",
        False,
    )


def test_a_command_line_for_another_process_says_all_there_is_whatever_its_environment() -> None:
    given = Config(bind="tcp://a:1", depth=3, target_ms=2.5e3, peers=("a", "b"), keys=Path("/k"), is_on=True)
    assert config_of(flags_of(given), {"LEGATO_DEPTH": "9", "LEGATO_LEVEL": "debug"}) == given
    plain = Config(bind="tcp://a:1")
    assert config_of(flags_of(plain), {"LEGATO_TARGET_MS": "7"}) == plain


def test_values_become_what_the_field_is() -> None:
    config = config_of(["--bind", "x", "--peers", "a, b", "--keys", "/tmp/k", "--is-on", "true", "--target-ms", "2.5"])

    assert config.peers == ("a", "b")
    assert config.keys == Path("/tmp/k")
    assert config.is_on is True
    assert config.target_ms == 2.5


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        ([], {}, ["--bind", "LEGATO_BIND"]),
        (["--bind", "x", "--depth", "many"], {}, ["--depth", "many"]),
        (["--bind", "x"], {"LEGATO_DEPTH": "1.5"}, ["LEGATO_DEPTH", "1.5"]),
        (["--bind", "x", "--level", "loud"], {}, ["--level", "loud"]),
        (["--bind", "x", "--depth", "101"], {}, ["101", "100.0"]),
        (["--bind", "x", "--config", "/nowhere"], {}, ["/nowhere"]),
    ],
)
def test_a_bad_option_is_named_with_its_value(argv: list[str], environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(argv, environ)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"), [("[scheduler]\ndept = 3\n", "dept"), ("[schedulr]\n", "schedulr"), ("[scheduler\n", "TOML")]
)
def test_a_misspelt_file_is_refused(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "legato.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config_of(["--bind", "x", "--config", str(file)])
    assert word in str(caught.value) or word == "TOML"
