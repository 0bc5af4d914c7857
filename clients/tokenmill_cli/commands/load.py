"""`tokenmill load`."""

from __future__ import annotations

import click
from tokenmill_client.admin_records import Load

from tokenmill_cli.app import App, console, pass_app, server_options
from tokenmill_cli.output import facts, print_json, show


@click.command()
@server_options
@pass_app
def load(app: App) -> None:
    """How busy the scheduler is."""
    with app.client() as client:
        now = client.admin.get_load()
    if app.json:
        print_json(now)
        return
    lines: list[tuple[str, object]] = [
        ("running", f"{now.num_requests_running} of {now.max_num_seqs}"),
        ("waiting", f"{now.num_requests_waiting}, {now.queued_tokens} tokens at most"),
        ("queue", f"paused {now.queue_pause_reason}" if now.queue_paused else ""),
        ("overload", f"stage {now.overload_stage}: {now.overload_reason}" if now.overload_stage else ""),
        ("KV cache", f"{now.kv_cache_usage:.1%} held"),
        ("batching", f"{now.batching}, {now.policy}, {now.max_num_batched_tokens} tokens a step"),
        ("occupancy", f"{now.batch_occupancy:.1%} of a batch, over {now.steps} steps"),
        ("tokens", f"{now.prompt_tokens} prompt, {now.output_tokens} output"),
        ("prefix cache", _prefix_cache(now)),
        ("preemptions", f"{now.preemptions}, {now.recomputed_tokens} tokens computed again"),
        ("stale results", now.stale_results),
        ("no blocks", now.no_blocks),
        ("ledger backlog", f"{now.ledger_backlog} records"),
    ]
    show(console(), facts(lines))


def _prefix_cache(now: Load) -> str:
    """Empty when no executor has one, or nothing has been looked up."""
    if not now.prefix_cache_queries:
        return ""
    share = now.prefix_cache_hits / now.prefix_cache_queries
    return f"{share:.1%} hit, {now.prefix_cache_hits} of {now.prefix_cache_queries} tokens"
