"""Which of the two services a flag of `serve all` is for. Must not know: what flags mean."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator, Sequence

import click

from tokenmill_cli.processes import check_installed

# `serve all` sets these itself.
_OWN = frozenset({"--port-file", "--executor", "--help"})
# Of these the one that clients meet is meant; the executor listens on this machine alone.
_SCHEDULERS = frozenset({"--listen", "--metrics-address", "--tls-cert", "--tls-key", "--tls-client-ca"})


def route(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """The executor's flags and the scheduler's, values with them. Raises UsageError for one that neither knows."""
    known = {module: _known(module) for module in ("tokenmill_executor", "tokenmill_scheduler")}
    routed: dict[str, list[str]] = {module: [] for module in known}
    for flag, words in _groups(flags):
        takers = [module for module in known if flag in known[module]]
        if not takers or flag in _OWN:
            raise click.UsageError(f"No such flag of `serve all`: {flag}")
        for module in ["tokenmill_scheduler"] if flag in _SCHEDULERS else takers:
            routed[module] += words
    return routed["tokenmill_executor"], routed["tokenmill_scheduler"]


def has_flag(flags: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in flags)


def _groups(flags: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words that belong to it: `--a=1`, or `--a` and what follows up to the next flag."""
    start = 0
    for end in range(1, len(flags) + 1):
        if end == len(flags) or flags[end].startswith("--"):
            words = list(flags[start:end])
            yield words[0].partition("=")[0], words
            start = end


def _known(module: str) -> frozenset[str]:
    check_installed(module)
    parser: argparse.ArgumentParser = importlib.import_module(f"{module}.settings").parser()
    # As a user sees them: argparse has no public list of its options.
    usage = parser.format_usage()
    return frozenset(re.findall(r"--[a-z][a-z0-9-]*", usage))
