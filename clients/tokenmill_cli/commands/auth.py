"""`tokenmill auth`: make tokens for a scheduler's --auth-tokens file, which has their digests alone."""

from __future__ import annotations

import hashlib
import secrets
import sys

import click

from tokenmill_cli.app import App, output_options, pass_app
from tokenmill_cli.output import print_json

# 256 bits: nothing slower than SHA-256 is needed to keep them from being guessed.
_TOKEN_BYTES = 32


@click.group()
def auth() -> None:
    """Make tokens for callers. Needs no server."""


@auth.command()
@click.argument("name")
@click.option("--tenant", help="Whose requests the token makes and sees.")
@click.option("--operator", is_flag=True, help="The token operates the service and sees all tenants' requests.")
@output_options
@pass_app
def create(app: App, name: str, tenant: str | None, operator: bool) -> None:
    """Draw a token, and write the entry for --auth-tokens that lets NAME use it.

    The entry goes to standard output, to be appended to the file; the token, which is kept nowhere, to standard error.
    """
    if (tenant is None) != operator:
        raise click.UsageError("Give either --tenant or --operator.")
    token = f"tm-{secrets.token_urlsafe(_TOKEN_BYTES)}"
    entry = {"name": name, "role": "operator" if operator else "client", "tenant": tenant, "sha256": _digest(token)}
    if app.json:
        print_json({"token": token, "entry": entry})
        return
    click.echo("[[token]]")
    for key, value in entry.items():
        if value is not None:
            click.echo(f'{key} = "{value}"')
    click.echo(f"Give this token to {name}; it is not shown again:\n{token}", err=True)


@auth.command("hash")
def hash_() -> None:
    """The SHA-256 of a token read from standard input, as --auth-tokens wants it.

    Only for tokens that were drawn at random: the digest of a password can be guessed.
    """
    token = click.prompt("Token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.read()
    if not token.strip():
        raise click.UsageError("There is no token on standard input.")
    click.echo(_digest(token.strip()))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
