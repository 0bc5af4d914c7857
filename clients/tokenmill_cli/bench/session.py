"""One measurement from end to end: the server is reached, the workload fitted to it, warmed up, run and repeated."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.console import Console
from tokenmill_client import AsyncClient
from tokenmill_workloads import Arrival

from tokenmill_cli.bench.grpc_target import GrpcTarget
from tokenmill_cli.bench.measurements import Measurement, machine, now
from tokenmill_cli.bench.progress import live
from tokenmill_cli.bench.runner import Target, Workload, run_workload
from tokenmill_cli.exits import CommandError

_WARM_UP = Arrival(0.0, prompt_tokens=32, output_tokens=8)


@dataclass(frozen=True, slots=True)
class Spec:
    """What to send and how often. Each run has prompts of its own, so that none finds the last one's in a prefix cache."""

    workload: str
    arrivals: tuple[Arrival, ...]
    rate: float | None
    seed: int
    repeat: int
    warmup: int
    label: str


@dataclass(frozen=True, slots=True)
class Server:
    """What a prompt may be: token ids below `vocab_size`, and at most `max_model_len` tokens with the output, if it is known."""

    target: Target
    name: str
    model: str
    vocab_size: int
    max_model_len: int | None = None


async def measure(server: Server, spec: Spec, screen: Console) -> Measurement:
    """Raises CommandError when a request is too long, and the error of a server that cannot be warmed up."""
    _check_lengths(server, spec.arrivals)
    await _warm_up(server, spec)
    started_at = now()
    runs = []
    for number in range(spec.repeat):
        workload = Workload.of(spec.workload, spec.arrivals, server.vocab_size, spec.seed + number)
        with live(screen, f"run {number + 1}/{spec.repeat}", workload) as on_progress:
            runs.append(await run_workload(server.target, workload, on_progress))
    return Measurement(
        label=spec.label,
        target=server.name,
        model=server.model,
        workload=spec.workload,
        rate=spec.rate,
        seed=spec.seed,
        started_at=started_at,
        machine=machine(),
        runs=tuple(runs),
    )


def _check_lengths(server: Server, arrivals: Sequence[Arrival]) -> None:
    if server.max_model_len is None:
        return
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals)
    if longest > server.max_model_len:
        raise CommandError(
            f"The longest request has {longest} tokens, the model takes {server.max_model_len}: shorten all of them, "
            f"with --length-scale {server.max_model_len / longest:.3f} or less."
        )


async def _warm_up(server: Server, spec: Spec) -> None:
    """One after the other, with prompts of their own."""
    warm_up = Workload.of("warm-up", (_WARM_UP,) * spec.warmup, server.vocab_size, spec.seed - 1)
    for prompt in warm_up.prompts:
        async for _ in server.target.generate(prompt, _WARM_UP.output_tokens):
            pass


@asynccontextmanager
async def scheduler(client: AsyncClient, model: str) -> AsyncIterator[Server]:
    """A tokenmill scheduler. Raises TokenmillError, and CommandError when it has no such model."""
    async with client:
        found = {served.name: served for served in await client.list_models()}
        if not found or (model and model not in found):
            raise CommandError(f"The server has the models {', '.join(found) or '(none)'}.")
        served = found[model] if model else next(iter(found.values()))
        target = GrpcTarget(client, served.name)
        yield Server(target, client.address, served.name, served.vocab_size, served.max_model_len)


@asynccontextmanager
async def openai_style(base_url: str, model: str, vocab_size: int) -> AsyncIterator[Server]:
    """Raises TargetError. The key is OPENAI_API_KEY, as for OpenAI's own clients."""
    if importlib.util.find_spec("httpx2") is None:
        raise CommandError("--base-url needs packages that are not installed: pip install 'tokenmill[bench]'.")
    from tokenmill_cli.bench.openai_target import OpenAiTarget

    async with OpenAiTarget(base_url, model, os.environ.get("OPENAI_API_KEY", "")) as target:
        yield Server(target, base_url, target.model, vocab_size)
