"""`tokenmill policy`: who runs sooner, changed while requests wait and run."""

from __future__ import annotations

from dataclasses import asdict

import click
from tokenmill_client import Lane
from tokenmill_client.admin_records import Policy

from tokenmill_cli.app import App, console, pass_app, server_options
from tokenmill_cli.output import facts, print_json, show, show_change

_reason_option = click.option("--reason", default="", help="Kept in the record of actions.")
_EXAMPLE = "real_time=50,standard=40,batch=10"


def _lane_shares(text: str) -> dict[Lane | str, int]:
    shares: dict[Lane | str, int] = {}
    for part in text.split(","):
        lane, _, share = part.strip().partition("=")
        if lane not in list(Lane) or not (share.isascii() and share.isdigit()):
            raise click.BadParameter(f"{text!r} is not like {_EXAMPLE}")
        shares[lane] = int(share)
    return shares


@click.group()
def policy() -> None:
    """Show and change the order of waiting requests."""


@policy.command("show")
@server_options
@pass_app
def show_policy(app: App) -> None:
    """The order in force, and by whom and why it was set."""
    with app.client() as client:
        now = client.admin.get_policy()
    if app.json:
        print_json(asdict(now))
        return
    show(console(), facts(_facts(now)))


@policy.command("set")
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--fair-share/--no-fair-share", default=None, help="Tenants share each lane by their weights, or not.")
@click.option("--lane-shares", type=_lane_shares, metavar="SHARES", help=f"Slots that lanes are guaranteed, per cent: {_EXAMPLE}.")
@_reason_option
@server_options
@pass_app
def set_policy(app: App, name: str | None, fair_share: bool | None, lane_shares: dict[Lane | str, int] | None, reason: str) -> None:
    """Change the policy (fcfs, priority, sjf, edf, lpm), until `reset`, also across restarts.

    What is not given stays as it is, also the share of a lane that is not named. Waiting requests are put in the new order at once;
    what runs goes on.
    """
    if name is None and fair_share is None and lane_shares is None:
        raise click.UsageError("name a policy, or give --fair-share or --lane-shares")
    with app.client() as client:
        changed = client.admin.set_policy(name, fair_share=fair_share, lane_shares=lane_shares, reason=reason)
    show_change(app.json, changed, "The policy is changed.", "The policy was so already.")


@policy.command("reset")
@_reason_option
@server_options
@pass_app
def reset(app: App, reason: str) -> None:
    """Go back to what the scheduler's settings say."""
    with app.client() as client:
        changed = client.admin.reset_policy(reason=reason)
    show_change(app.json, changed, "The policy is that of the settings.", "No policy was set.")


def _facts(now: Policy) -> list[tuple[str, str]]:
    shares = now.lane_shares
    return [
        ("policy", now.policy),
        ("fair share", "on" if now.fair_share else "off"),
        ("lane shares", f"real_time {shares.real_time} %, standard {shares.standard} %, batch {shares.batch} %"),
        ("set", now.reason or "by the settings"),
    ]
