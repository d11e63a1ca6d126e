"""Options of a process: one frozen dataclass, filled from flags, then environment, then a TOML file, then defaults.

Each field of the dataclass is an option:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class SchedulerConfig:
        tbt_target_ms: float = option(100.0, "the longest gap between two tokens of a stream that is on time")

is `--tbt-target-ms 80`, or `LEGATO_TBT_TARGET_MS=80`, or `tbt_target_ms = 80` under `[scheduler]` in the file that
`--config` (or `LEGATO_CONFIG`) names. Relations between fields belong in `__post_init__`, as ValueError with both
values in the message.
"""

import argparse
import dataclasses
import os
import tomllib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

T = TypeVar("T")

SECTIONS = ("up", "gateway", "tokenizer", "scheduler", "worker")
"""Tables that a configuration file may hold: one per command, each read by that command alone."""

_NO_DEFAULT: Any = dataclasses.MISSING


class ConfigError(Exception):
    """An option has no value or a wrong one; the message names the option and where the value came from."""


def option(default: Any = _NO_DEFAULT, help: str = "", *, metavar: str = "", is_hidden: bool = False) -> Any:
    """Declare an option. Without a default it must be given. A hidden one, which only tests need, is not in --help."""
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar, "is_hidden": is_hidden})


def add_options(parser: argparse.ArgumentParser, config_type: type[Any]) -> None:
    """Give the parser a flag for each option of config_type, and --config."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with more options (LEGATO_CONFIG)")
    hints = get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        default = "" if field.default in (_NO_DEFAULT, None, ()) else f" (default: {_as_text(field.default)})"
        parser.add_argument(
            flag_of(field.name),
            dest=field.name,
            default=None,
            metavar=field.metadata["metavar"] or _metavar_of(hints[field.name]),
            help=argparse.SUPPRESS
            if field.metadata["is_hidden"]
            else (field.metadata["help"] + default).replace("%", "%%"),
        )


def load(config_type: type[T], section: str, flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> T:
    """Return the configuration from parsed flags (absent ones None), the environment, and the section of the file.

    Raises:
        ConfigError: If a value does not convert, a required option is missing, the file is unreadable or has an
            unknown key, or the dataclass refuses the combination.
    """
    environ = os.environ if environ is None else environ
    table = _read_table(flags.get("config") or environ.get("LEGATO_CONFIG"), section, config_type)
    hints = get_type_hints(config_type)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]  # T is a dataclass by contract.
        env_name = f"LEGATO_{field.name.upper()}"
        for source, value in (
            (flag_of(field.name), flags.get(field.name)),
            (env_name, environ.get(env_name)),
            (f"[{section}] {field.name}", table.get(field.name)),
        ):
            if value is not None:
                values[field.name] = _convert(value, hints[field.name], source)
                break
        else:
            if field.default is _NO_DEFAULT:
                raise ConfigError(f"{flag_of(field.name)} (or {env_name}) must be given")
    try:
        return config_type(**values)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def flags_of(config: Any) -> list[str]:
    """Return a command line that gives another process the same configuration, whatever its environment says.

    Options without a value are left out: nothing on a command line means none.
    """
    argv: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None:
            argv += [flag_of(field.name), _as_text(value)]
    return argv


def flag_of(name: str) -> str:
    """The flag of the option in field name."""
    return "--" + name.replace("_", "-")


def _read_table(path: str | None, section: str, config_type: type[Any]) -> dict[str, Any]:
    if not path:
        return {}
    try:
        with Path(path).open("rb") as file:
            document = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if unknown := sorted(set(document) - set(SECTIONS)):
        raise ConfigError(f"--config {path}: unknown table {unknown[0]!r}; known: {', '.join(SECTIONS)}")
    table: dict[str, Any] = document.get(section, {})
    names = {field.name for field in dataclasses.fields(config_type)}
    if unknown := sorted(set(table) - names):
        raise ConfigError(f"--config {path}: [{section}] has no option {unknown[0]!r}")
    return table


def _convert(value: Any, hint: Any, source: str) -> Any:
    inner = _without_none(hint)
    if get_origin(inner) is tuple and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, hint, strict=False, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {value!r}: {error}") from error


def _decode_path(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise NotImplementedError(kind)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        kept = [part for part in get_args(hint) if part is not NoneType]
        return kept[0] if len(kept) == 1 else hint
    return hint


def _metavar_of(hint: Any) -> str:
    inner = _without_none(hint)
    if get_origin(inner) is tuple:
        return "A,B,…"
    if isinstance(inner, type) and issubclass(inner, Enum):
        return "|".join(str(member.value) for member in inner)
    if literals := [str(value) for value in get_args(inner)]:
        return "|".join(literals)
    names = {int: "N", float: "X", bool: "true|false", Path: "PATH", str: "TEXT"}
    return names.get(inner, "VALUE")


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
