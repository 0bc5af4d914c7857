"""`tokenmill demo`: one answer, then static against continuous batching on the burst workload, on processes of its own."""

from __future__ import annotations

import asyncio
import collections
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from tokenmill_client import AsyncClient, Client
from tokenmill_workloads import burst

from tokenmill_cli.app import console
from tokenmill_cli.bench.grpc_target import GrpcTarget
from tokenmill_cli.bench.progress import live
from tokenmill_cli.bench.runner import Workload, WorkloadRun, run_workload
from tokenmill_cli.commands.models import pull_model
from tokenmill_cli.comparison import comparison_table, figures, occupancy_plot
from tokenmill_cli.exits import CommandError
from tokenmill_cli.models import DEFAULT_MODEL, SOURCES
from tokenmill_cli.output import show
from tokenmill_cli.processes import Service

_QUESTION = "Explain in two sentences why the sky is blue."
_ANSWER_TOKENS = 80
_SLOTS = 8
_LOG_LINES = 20
_PLOT_WIDTH = 64


@click.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="A model as executors take it; `simulated` needs none.")
@click.option("--requests", "count", type=click.IntRange(min=1), default=20, show_default=True, help="Requests of the burst.")
@click.option("--seed", default=42, show_default=True, help="Draws the lengths of prompts and outputs.")
def demo(model: str, count: int, seed: int) -> None:
    """Compare static with continuous batching.

    Starts the service, streams one answer, and sends the same burst of requests under both.

    Everything runs on this machine, on free ports and a temporary database, and is gone afterwards.
    """
    if model in SOURCES:
        pull_model(SOURCES[model])
    screen = console()
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as name:
        stage = _Stage(Path(name), screen)
        with stage, stage.executor(model) as executor_address:
            with stage.scheduler("static", executor_address) as address:
                _answer(screen, address, model)
                static = asyncio.run(_burst(screen, address, "static", count, seed))
            with stage.scheduler("continuous", executor_address) as address:
                continuous = asyncio.run(_burst(screen, address, "continuous", count, seed))
    _compare(screen, static, continuous)


class _Stage:
    """Starts the services quietly; what they logged is shown when one fails."""

    def __init__(self, folder: Path, screen: Console) -> None:
        self._folder = folder
        self._screen = screen
        self._log: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            click.echo("\n".join(self._log), err=True)

    @contextmanager
    def executor(self, model: str) -> Iterator[str]:
        self._screen.print(f"Starting an executor with {model} …")
        with self._running("executor", "tokenmill_executor", "--model", model) as address:
            yield address

    @contextmanager
    def scheduler(self, batching: str, executor: str) -> Iterator[str]:
        self._screen.print(f"Starting a scheduler, {batching} batching, {_SLOTS} slots …")
        database = f"sqlite:///{self._folder / batching}.db"
        flags = ["--executor", executor, "--database", database, "--batching", batching, "--max-num-seqs", str(_SLOTS)]
        # A burst takes a moment to arrive: static batching is not to start with a batch that is not full.
        flags += ["--max-waiting-time", "0.5"]
        with self._running("scheduler", "tokenmill_scheduler", *flags) as address:
            with Client(address) as client:
                client.wait_ready()
            yield address

    @contextmanager
    def _running(self, name: str, module: str, *flags: str) -> Iterator[str]:
        with Service(name, module, [*flags, "--listen", "127.0.0.1:0"], self._folder, self._log.append) as service:
            yield service.address()


def _answer(screen: Console, address: str, model: str) -> None:
    with Client(address) as client:
        chat = client.list_models()[0].has_chat_template
        screen.print(f"\n[bold]{_QUESTION}[/bold]")
        prompt = {"messages": [{"role": "user", "content": _QUESTION}]} if chat else {"prompt": _QUESTION}
        stream = client.generate(**prompt, max_tokens=_ANSWER_TOKENS, temperature=0)
        for delta in stream:
            click.echo(delta.text, nl=False)
            sys.stdout.flush()
    click.echo("\n")


async def _burst(screen: Console, address: str, batching: str, count: int, seed: int) -> WorkloadRun:
    async with AsyncClient(address) as client:
        (model, *_) = await client.list_models()
        workload = Workload.of("burst", burst(count, seed=seed), model.vocab_size, seed)
        with live(screen, batching, workload) as on_progress:
            run = await run_workload(GrpcTarget(client), workload, on_progress)
    if run.failures:
        raise CommandError(f"{len(run.failures)} of {count} requests failed: {run.failures[0]}")
    screen.print(f"{batching}: {count} requests, {workload.output_tokens} output tokens in {run.wall_s:.2f} s\n")
    return run


def _compare(screen: Console, static: WorkloadRun, continuous: WorkloadRun) -> None:
    show(screen, comparison_table(figures(static), figures(continuous)))
    unicode = (screen.encoding or "").lower().startswith("utf")
    across_s = max(static.wall_s, continuous.wall_s)
    screen.print(f"\nSlots in use over {across_s:.1f} s (full height: {static.slots})")
    for name, run in (("static", static), ("continuous", continuous)):
        screen.print(f"{name:<10} {occupancy_plot(run, _PLOT_WIDTH, across_s, unicode=unicode)}")
