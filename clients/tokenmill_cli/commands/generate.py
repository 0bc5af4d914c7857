"""`tokenmill generate`: a prompt in, a stream of text out."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from tokenmill_client import Delta, Message, Output, RequestNotDone, Stream

from tokenmill_cli.app import App, pass_app, server_options
from tokenmill_cli.exits import CommandError, ExitCode
from tokenmill_cli.output import print_json
from tokenmill_cli.sampling import chosen, request_options


@click.command()
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="The prompt is a user's turn in a chat, for the model's chat template.")
@click.option("--system", metavar="TEXT", help="The system's turn before it; implies --chat.")
@click.option("--token-ids", is_flag=True, help="Token ids in and out: the prompt is ids, and ids are printed.")
@click.option("--detached", is_flag=True, default=None, help="Let the request run on when this command is interrupted.")
@request_options
@server_options
@pass_app
def generate(app: App, prompt: str | None, chat: bool, system: str | None, token_ids: bool, **options: Any) -> None:
    """Generate text and print it as it comes.

    From PROMPT, or from standard input. Several choices (-n) are printed when all are there.
    """
    if token_ids and (chat or system):
        raise click.UsageError("--token-ids is a prompt of its own kind: leave out --chat and --system.")
    request = chosen(options)
    text = _read_prompt(prompt)
    if token_ids:
        request["token_ids"] = _read_token_ids(text)
    elif chat or system is not None:
        request["messages"] = _turns(system, text)
    text_prompt = None if "token_ids" in request or "messages" in request else text
    with app.client() as client, client.generate(text_prompt, **request) as stream:
        _follow(app, stream, token_ids, several=request.get("n", 1) > 1)


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("Give a prompt, or `-` to type it and end it with Ctrl-D.")
    try:
        # The newline that a shell or an editor ends a text with is not meant as part of it.
        text = sys.stdin.read().removesuffix("\n")
        text.encode()  # Where the locale does not say UTF-8, Python lets pass what is not, for files' names.
        return text
    except UnicodeError:
        raise click.UsageError("The prompt on standard input is not UTF-8 text.") from None


def _read_token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in re.split(r"[\s,\[\]]+", text) if word]
    except ValueError:
        raise click.UsageError("With --token-ids the prompt is whole numbers, separated by spaces or commas.") from None


def _turns(system: str | None, text: str) -> list[Message]:
    turns: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*turns, {"role": "user", "content": text}]


def _follow(app: App, stream: Stream, token_ids: bool, several: bool) -> None:
    started_s = time.monotonic()
    try:
        with _outages_told():
            for delta in stream:
                if app.json or several:
                    continue
                click.echo(_shown(delta, token_ids), nl=False)
                sys.stdout.flush()
    except RequestNotDone as error:
        _end(app, stream, started_s, token_ids)
        text, name = str(error), f"Request {stream.request_id}"
        raise CommandError(text if text.startswith(name) else f"{name}: {text}", ExitCode.FAILURE) from error
    except BaseException:
        if stream.output.text and not app.json:
            click.echo()
        raise
    _end(app, stream, started_s, token_ids)


@contextmanager
def _outages_told() -> Iterator[None]:
    """To standard error, in the client's words: it waits for a scheduler for minutes, and text that stands still tells nothing."""
    logger, handler = logging.getLogger("tokenmill_client"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("\n[%(message)s]"))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _shown(part: Delta | Output, token_ids: bool) -> str:
    return "".join(f"{token_id} " for token_id in part.token_ids) if token_ids else part.text


def _end(app: App, stream: Stream, started_s: float, token_ids: bool) -> None:
    """Of several choices, all their output."""
    outputs = stream.outputs
    if app.json:
        print_json(outputs if len(outputs) > 1 else outputs[0])
        return
    if len(outputs) == 1:
        click.echo()
    for output in outputs if len(outputs) > 1 else ():
        click.secho(f"choice {output.choice}: {output.finish_reason or 'unfinished'}", bold=True)
        click.echo(_shown(output, token_ids))
    if sys.stderr.isatty():
        elapsed_s = time.monotonic() - started_s
        count = stream.usage.output_tokens
        reason = outputs[0].finish_reason or "unfinished"
        line = f"[{stream.request_id}: {count} tokens in {elapsed_s:.1f} s, {count / elapsed_s:.1f} tokens/s, {reason}]"
        click.secho(line, dim=True, err=True)
