"""A tenant's quota on real processes: it waits and is told why, others run, and a change of the tenants file holds at once."""

from __future__ import annotations

import hashlib

from tokenmill_client import Client, RequestState
from tokenmill_client.records import RequestInfo

from tests.e2e.commands import until
from tests.fakes.processes import Processes

TOKENS = """
[[token]]
name = "olga"
role = "operator"
sha256 = "{digest}"

[tenant.search]
max_num_seqs = {max_num_seqs}
"""


def test_a_tenant_at_its_quota_waits_until_the_tenants_file_says_otherwise(processes: Processes) -> None:
    file, digest = processes.folder / "tokens.toml", hashlib.sha256(b"tm-olga").hexdigest()
    file.write_text(TOKENS.format(digest=digest, max_num_seqs=1))
    executor = processes.executor("--simulated-step-ms", "20")
    scheduler = processes.scheduler(executor.address, flags=("--auth-tokens", str(file)))
    with Client(scheduler.address, token="tm-olga") as client:

        def info(request_id: str) -> RequestInfo:
            return client.admin.get_request(request_id).info

        client.wait_ready()
        for request_id, tenant in (("a", "search"), ("b", "search"), ("c", "mail")):
            client.submit(token_ids=[40, 50], max_tokens=1_000, seed=1, request_id=request_id, tenant=tenant)
        until(lambda: info("a").state is info("c").state is RequestState.DECODE)
        assert info("b").wait_reason == "tenant search has 1 of 1 sequences running"
        assert client.admin.get_load().num_requests_running == 2

        file.write_text(TOKENS.format(digest=digest, max_num_seqs=2))
        until(lambda: info("b").state is RequestState.DECODE)
        for request_id in "abc":
            client.cancel(request_id)
        # C68: all gauges are back within a step.
        until(lambda: client.admin.get_load().kv_cache_usage == 0.0)
        load = client.admin.get_load()
        assert (load.num_requests_running, load.num_requests_waiting, load.queued_tokens) == (0, 0, 0)
