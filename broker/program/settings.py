"""Frozen dataclasses as configuration: one definition feeds flags, environment variables, TOML files and dumps.

Weakest first: field defaults, `tables` given by the program, --config FILE, environment variables, flags. Every
problem is collected and reported at once, each with the place it came from.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from broker.contract import errors

_C = TypeVar("_C")
Table = tuple[str, Mapping[str, Any]]
"""A source of settings, named for error messages, and the settings."""


def setting(default: Any, help_text: str) -> Any:
    """A dataclass field with the help text that its flag shows."""
    return dataclasses.field(default=default, metadata={"help": help_text})


def add_arguments(parser: argparse.ArgumentParser, *classes: type[Any]) -> None:
    """Adds a flag per field, and --config and --dump-config.

    A field that several classes share becomes one flag; where their defaults differ, it shows all of them in turn.
    """
    group = parser.add_argument_group("settings (also keys of --config FILE and environment variables)")
    for name, (hint, field) in _fields(classes).items():
        defaults = {_show(f.default): f for cls in classes for f in dataclasses.fields(cls) if f.name == name}
        default = "" if field.default in ("", (), None) else f" (default: {' / '.join(defaults)})"
        text = str(field.metadata.get("help", "")).replace("%", "%%") + default.replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if hint is bool:
            group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            is_list = typing.get_origin(hint) is tuple
            action = "append" if is_list else "store"
            group.add_argument(flag, dest=name, metavar=_metavar(hint), default=None, action=action, help=text)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    parser.add_argument("--dump-config", action="store_true", help="print the effective settings as TOML and stop")


def load(cls: type[_C], args: argparse.Namespace, *, tables: Sequence[Table] = (), env_prefix: str) -> _C:
    """The settings of one class; see `resolve`."""
    return build(cls, resolve((cls,), args, tables=tables, env_prefix=env_prefix))


def resolve(
    classes: Sequence[type[Any]], args: argparse.Namespace, *, tables: Sequence[Table] = (), env_prefix: str
) -> dict[str, Any]:
    """Returns the effective value of every field of `classes`.

    Args:
        classes: Dataclasses whose fields are the known keys.
        args: What `add_arguments` parsed.
        tables: Weaker settings than --config, weakest first.
        env_prefix: Variables `PREFIX` + upper-case field name are read; others with this prefix are errors.

    Raises:
        ConfigError: Unknown keys, wrong types; all of them in one message.
    """
    fields = _fields(classes)
    values: dict[str, Any] = {name: field.default for name, (_, field) in fields.items()}
    problems: list[str] = []
    for where, table in (*tables, *_file(args.config), *_environment(env_prefix), *_flags(fields, args)):
        textual = where.startswith(("flag", "environment"))
        for key, raw in table.items():
            if key not in fields:
                problems.append(f"{where}: unknown key {key!r}{_suggest(key, fields)}")
                continue
            try:
                values[key] = _parse(raw, fields[key][0]) if textual else _check(raw, fields[key][0])
            except ValueError as error:
                problems.append(f"{where}: {key} {error}")
    if problems:
        raise errors.ConfigError(
            "\n".join(problems) if len(problems) == 1 else "\n  ".join((f"{len(problems)} wrong settings", *problems)),
            todo="--help lists every setting; --dump-config prints what is in force",
        )
    return values


def given(args: argparse.Namespace, env_prefix: str) -> set[str]:
    """Returns the keys that the user named: in --config FILE, in the environment, as flags."""
    flags = {name for name, value in vars(args).items() if value is not None}
    return flags.union(*(table for _, table in (*_file(args.config), *_environment(env_prefix))))


def parse(cls: type[Any], key: str, text: str) -> Any:
    """Returns the value of a field from text, as its flag would have it.

    Raises:
        ConfigError: It is not of the field's type.
    """
    try:
        return _parse(text, _fields((cls,))[key][0])
    except ValueError as error:
        raise errors.ConfigError(f"{key} {error}") from None


def build(cls: type[_C], values: Mapping[str, Any]) -> _C:
    """An instance of `cls` from `values`, which may hold more than it needs."""
    return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})  # type: ignore[arg-type]


def dump(*configs: Any) -> str:
    """Returns settings as TOML that --config reads back."""
    merged: dict[str, Any] = {}
    for config in configs:
        merged |= {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return "".join(f"{name} = {_toml(value)}\n" for name, value in merged.items())


def dump_if_asked(args: argparse.Namespace, *configs: Any) -> bool:
    """Prints the settings if --dump-config was given; returns true if so."""
    if args.dump_config:
        sys.stdout.write(dump(*configs))
    return bool(args.dump_config)


def _fields(classes: Iterable[type[Any]]) -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    found: dict[str, tuple[Any, dataclasses.Field[Any]]] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            found.setdefault(field.name, (hints[field.name], field))
    return found


def _file(path: Path | None) -> list[Table]:
    if path is None:
        return []
    import tomllib  # here: most actors read no file, and boards have no memory to spare

    try:
        with open(path, "rb") as file:
            return [(str(path), tomllib.load(file))]
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise errors.ConfigError(
            f"the settings file cannot be read: {error}",
            where=str(path),
            todo="it must be TOML, one `key = value` a line",
        ) from error


def _environment(prefix: str) -> list[Table]:
    found = {k[len(prefix) :].lower(): v for k, v in os.environ.items() if k.startswith(prefix)}
    return [(f"environment {prefix}*", found)]


def _flags(fields: Mapping[str, Any], args: argparse.Namespace) -> list[Table]:
    given = {name: getattr(args, name, None) for name in fields}
    for name, value in given.items():
        if isinstance(value, list):  # a flag of a list may come once with commas, or once for each item
            given[name] = ",".join(value)
    return [("flag", {name: value for name, value in given.items() if value is not None})]


def _suggest(key: str, fields: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(fields), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _parse(text: Any, hint: Any) -> Any:
    """A value from a flag or variable: text for all but flags that are booleans already."""
    if isinstance(text, bool):
        return text
    origin = typing.get_origin(hint)
    if origin is tuple:
        return tuple(_parse(part.strip(), typing.get_args(hint)[0]) for part in text.split(",") if part.strip())
    if hint is str:
        return text
    if hint is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if text.lower() not in words:
            raise ValueError(f"must be true or false, not {text!r}")
        return words[text.lower()]
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError(f"must be {_name(hint)}, not {text!r}") from None
    try:
        return _check(json.loads(text), hint)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON, not {text!r} ({error})") from None


def _check(value: Any, hint: Any) -> Any:
    """A value from TOML or JSON, if it has the type that `hint` says."""
    origin = typing.get_origin(hint)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_check(item, typing.get_args(hint)[0]) for item in value)
    if origin is dict and isinstance(value, dict):
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (bool, int, str) and type(value) is hint:
        return value
    raise ValueError(f"must be {_name(hint)}, not {value!r}")


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"a list of {_name(typing.get_args(hint)[0]).split(' ', 1)[1]}s"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "a truth value"}
    return names.get(hint, "a table")


def _metavar(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        item = _metavar(typing.get_args(hint)[0])
        return f"{item},{item}..."
    return {int: "N", float: "X", str: "TEXT"}.get(hint, "JSON")


def _show(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf and nan are TOML, and not JSON
    return json.dumps(value, ensure_ascii=False)
