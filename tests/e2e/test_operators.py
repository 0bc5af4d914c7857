"""What operators do to running services, by the command line, on real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenmill_client import Client, RequestState
from tokenmill_client.records import RequestInfo

from tests.e2e.commands import tokenmill, until
from tests.fakes.calls import foretold
from tests.fakes.processes import Processes, ServiceProcess

POISON = 7


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as running:
        yield running


def run(service: ServiceProcess, *argv: str) -> Any:
    """A command's answer as JSON."""
    done = tokenmill("--server", service.address, *argv, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def state(client: Client, request_id: str) -> RequestState:
    return client.get_request(request_id).info.state


def info(client: Client, request_id: str) -> RequestInfo:
    return client.admin.get_request(request_id).info


def test_a_pause_and_a_policy_outlive_the_scheduler_and_say_why(processes: Processes) -> None:
    executor = processes.executor()
    scheduler = processes.scheduler(executor.address)
    with Client(scheduler.address) as client:
        client.wait_ready()
        assert run(scheduler, "queue", "pause", "--reason", "new model") == {"changed": True}
        assert run(scheduler, "policy", "set", "sjf", "--fair-share", "--reason", "short ones") == {"changed": True}
        client.submit(token_ids=[40, 50], max_tokens=5, seed=1, request_id="a")
        assert info(client, "a").wait_reason == "the queue is paused by anonymous: new model"
        assert (info(client, "a").wait_code, client.admin.get_load().wait_reasons) == ("paused", {"paused": 1})
    scheduler.kill()
    scheduler = processes.scheduler(executor.address)
    with Client(scheduler.address) as client:
        client.wait_ready()
        status = run(scheduler, "queue", "status")
        assert (status["queue_pause_reason"], status["num_requests_waiting"]) == ("by anonymous: new model", 1)
        policy = run(scheduler, "policy", "show")
        assert (policy["policy"], policy["fair_share"], policy["reason"]) == ("sjf", True, "by anonymous: short ones")
        assert run(scheduler, "queue", "resume") == {"changed": True}
        assert client.attach("a").result().token_ids == tuple(foretold([40, 50], 5))
    verbs = [action["verb"] for action in run(scheduler, "actions", "list")]
    assert verbs == ["resume_queue", "set_policy", "pause_queue"]


def test_a_drained_executors_work_goes_on_at_the_other_and_nothing_fails(processes: Processes) -> None:
    executors = [processes.executor("--simulated-step-ms", "10", name=name) for name in ("x1", "x2")]
    scheduler = processes.scheduler(*(executor.address for executor in executors), flags=("--max-num-seqs", "4"))
    prompts = {f"r{number}": [40 + number, 50] for number in range(6)}
    with Client(scheduler.address) as client:
        until(lambda: sum(executor.connected for executor in client.admin.list_executors()) == 2)
        for request_id, prompt in prompts.items():
            client.submit(token_ids=prompt, max_tokens=200, seed=1, request_id=request_id)
        until(lambda: all(executor.running for executor in client.admin.list_executors()))
        # A command takes longer to start on a busy machine than these requests run.
        assert client.admin.drain_executor("x1", reason="new driver").draining
        until(lambda: client.admin.list_executors()[0].running == 0)
        results = {request_id: client.attach(request_id).result() for request_id in prompts}
        assert {name: list(result.token_ids) for name, result in results.items()} == {
            name: foretold(prompt, 200) for name, prompt in prompts.items()
        }
        moves = [move.reason for name in prompts for move in client.admin.get_request(name).transitions]
        assert "executor drained by anonymous: new driver" in moves
        assert not run(scheduler, "executors", "undrain", "x1")["draining"]
        assert client.attach(client.submit(token_ids=[60], max_tokens=3, seed=1).request_id).result().token_ids == tuple(
            foretold([60], 3)
        )


def test_a_request_that_kills_executors_is_quarantined_alone_and_can_be_tried_again(processes: Processes) -> None:
    flags = ("--simulated-step-ms", "10", "--simulated-poison-token", str(POISON))
    executor = processes.executor(*flags)
    scheduler = processes.scheduler(executor.address)
    with Client(scheduler.address) as client:
        client.wait_ready()
        innocent = {f"r{number}": [40 + number, 50] for number in range(4)}
        for request_id, prompt in innocent.items():
            client.submit(token_ids=prompt, max_tokens=150, seed=1, request_id=request_id)
        until(lambda: state(client, "r3") is RequestState.DECODE)
        client.submit(token_ids=[40, POISON, 50], max_tokens=5, seed=1, request_id="poison")
        until(lambda: not executor.runs)
        executor = processes.executor(*flags)
        until(lambda: not executor.runs)
        executor = processes.executor()
        for request_id, prompt in innocent.items():
            assert list(client.attach(request_id).result().token_ids) == foretold(prompt, 150)
        failed = info(client, "poison")
        assert (failed.state, failed.error) == (
            RequestState.FAILED,
            "2 executors were lost while they ran this request; it is not tried again",
        )
        assert any("request failed" in line and "poison" in line for line in scheduler.log.read_text().splitlines())
        new_id = run(scheduler, "requests", "retry", "poison", "--reason", "mended")["request_id"]
        assert list(client.attach(new_id).result().token_ids) == foretold([40, POISON, 50], 5)
        assert info(client, new_id).retry_of == "poison"
    (action,) = run(scheduler, "requests", "get", "poison")["actions"]
    assert (action["verb"], action["reason"], action["detail"]) == ("retry", "mended", f"as {new_id}")
