"""Flags of a service, each also an environment variable TOKENMILL_<FLAG>, and the kinds of value they take.

An operator's mistake is one sentence, in a SettingsError. Must not know: which flags there are.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

FlagGroups = Mapping[str, Mapping[str, dict[str, Any]]]

_LEAST_MESSAGE_BYTES = 64 << 10
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class SettingsError(Exception):
    """An operator's mistake; the text is one sentence that says what to do."""


class FlagParser(argparse.ArgumentParser):
    """Of `groups`: title → flag → the options of `add_argument`. Parsing raises SettingsError; `--help` prints and exits."""

    def __init__(self, groups: FlagGroups, **options: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **options)
        for title, flags in groups.items():
            section = self.add_argument_group(title)
            for flag, flag_options in flags.items():
                section.add_argument(flag, **flag_options)

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)

    def values(self, argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
        """By destination. A flag wins over the environment."""
        given = {argument.partition("=")[0] for argument in argv}
        from_environment: list[str] = []
        for action in self._actions:
            value = environ.get(_variable(action))
            # One that is given is left out, because flags that can be repeated would add up.
            if value is not None and given.isdisjoint(action.option_strings):
                from_environment += _environment_flags(action, value)
        try:
            return vars(self.parse_args([*from_environment, *argv]))
        except SettingsError as error:
            raise SettingsError(self._as_it_was_given(str(error), from_environment)) from None

    def _as_it_was_given(self, message: str, from_environment: Sequence[str]) -> str:
        """argparse's "argument --flag: …", or where the flag came from the environment its variable in that place."""
        flags = {flag.partition("=")[0] for flag in from_environment}
        for action in self._actions:
            named = f"argument {'/'.join(action.option_strings)}:"
            if message.startswith(named) and not flags.isdisjoint(action.option_strings):
                return f"{_variable(action)}:{message.removeprefix(named)}"
        return message


def _variable(action: argparse.Action) -> str:
    return f"TOKENMILL_{action.dest.upper()}"


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _environment_flags(action: argparse.Action, value: str) -> list[str]:
    if isinstance(action, argparse.BooleanOptionalAction):
        on, off = action.option_strings
        words = {"1": on, "true": on, "yes": on, "0": off, "false": off, "no": off}
        if value.lower() not in words:
            raise SettingsError(f"{_variable(action)} is {value!r}: say true or false")
        return [words[value.lower()]]
    values = value.split(",") if isinstance(action, argparse._AppendAction) else [value]
    return [f"{action.option_strings[-1]}={part.strip()}" for part in values]


# ---- kinds of value: argparse quotes the function's message, not its name ------------------------------------------------------


def count(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def count_or_zero(text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def number(text: str) -> float:
    """Of at least 0; the flag's name says in which unit."""
    return _at_least_0(text, "a number")


def seconds(text: str) -> float:
    return _at_least_0(text, "a number of seconds")


def _at_least_0(text: str, words: str) -> float:
    if not 0 <= (value := _number(text)) < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not {words} of at least 0")
    return value


def timeout(text: str) -> float:
    if (value := seconds(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def share(text: str) -> float:
    if not 0 <= (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not at least 0 and below 1")
    return value


def fraction(text: str) -> float:
    if not 0 < (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def size_bytes(text: str) -> int:
    """With a unit or without: 2GiB, 512 MiB, 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text.strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS or (size := int(float(match[1]) * _UNITS[match[2].upper()])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GiB or 64MiB")
    return size


def message_bytes(text: str) -> int:
    """Of one gRPC message: a size within what one can carry and what one needs."""
    if (size := size_bytes(text)) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is more than gRPC can carry in one message, 2GiB")
    if size < _LEAST_MESSAGE_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is too little for a message with a prompt and its parameters: 64KiB at least")
    return size


def file(text: str) -> Path | None:
    """Empty: none, which takes back what the environment says."""
    return Path(text) if text else None


# ---- flags that both services have ---------------------------------------------------------------------------------------------

LOG_FLAGS: dict[str, dict[str, Any]] = {
    "--log-format": {"choices": ("console", "json"), "default": "console", "help": "of the log on standard error"},
    "--log-level": {"choices": ("debug", "info", "warning", "error"), "default": "info", "help": "least level logged"},
}
METRICS_FLAGS: dict[str, dict[str, Any]] = {
    "--metrics-address": {
        "default": "",
        "help": "HOST:PORT to serve Prometheus metrics on, over plain HTTP (port 0: any free one); empty: none",
    },
}
TLS_FLAGS: dict[str, dict[str, Any]] = {
    "--tls-cert": {"type": file, "default": None, "help": "PEM file of the certificate to serve with; turns on TLS"},
    "--tls-key": {"type": file, "default": None, "help": "PEM file of its private key"},
    "--tls-client-ca": {
        "type": file,
        "default": None,
        "help": "PEM file of the authority whose certificates clients must show (mutual TLS)",
    },
}
