"""An actor's settings with what orders changed of them."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from broker.contract import errors, messages
from broker.program import settings
from edge_actor import config

_log = logging.getLogger(__name__)


def check_keys(own: config.ActorConfig, changes: Mapping[str, str]) -> None:
    """Refuses what this board lets nobody change from afar.

    Raises:
        ConfigError: Some key is no such setting.
    """
    if wrong := [key for key in changes if not _is_open(own, key)]:
        arguments = [messages.ENV_ARGUMENT + name for name in own.allow_env_kwargs]
        raise errors.ConfigError(
            f"not from the network: {', '.join(wrong)}; this board allows {', '.join((*messages.SETTABLE, *arguments))}"
        )


def applied(own: config.ActorConfig, changes: Mapping[str, str]) -> config.ActorConfig:
    """Returns the board's settings with the changes.

    Raises:
        ConfigError: They are not what their keys want, or clash with what else is set here.
    """
    check_keys(own, changes)
    values: dict[str, Any] = {}
    arguments = dict(own.env_arguments)
    for key, text in changes.items():
        if key in messages.SETTABLE:
            values[key] = settings.parse(config.ActorConfig, key, text)
        else:
            arguments[key.removeprefix(messages.ENV_ARGUMENT)] = _scalar(key, text)
    if arguments != own.env_arguments:
        values["env_kwargs"] = json.dumps(arguments)
    return dataclasses.replace(own, **values)


def still_fitting(own: config.ActorConfig, changes: Mapping[str, str]) -> config.ActorConfig:
    """Returns the same; without changes that this board's settings no longer fit, which is logged."""
    try:
        return applied(own, changes)
    except errors.ConfigError as error:
        _log.warning("what orders changed of the settings is passed over: %s", error.what)
        return own


def _is_open(own: config.ActorConfig, key: str) -> bool:
    name = key.removeprefix(messages.ENV_ARGUMENT)
    return key in messages.SETTABLE or (name != key and name in own.allow_env_kwargs)


def _scalar(key: str, text: str) -> Any:
    """Returns a number, truth value or text; whatever is no JSON is a text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, (dict, list)):
        raise errors.ConfigError(f"{key} must be a number, a truth value or a text, not {text[:60]}")
    return value
