"""`tokenmill completion`: shell completion, made by click."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  eval "$(tokenmill completion bash)"        in ~/.bashrc
    zsh:   eval "$(tokenmill completion zsh)"         in ~/.zshrc
    fish:  tokenmill completion fish | source         in config.fish
    """
    completer = get_completion_class(shell)
    assert completer is not None
    click.echo(completer(context.find_root().command, {}, "tokenmill", "_TOKENMILL_COMPLETE").source())
