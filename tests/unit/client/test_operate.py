"""What operators do from the command line, against a fake scheduler."""

from __future__ import annotations

import json

import click
import pytest
from tokenmill.inference.v1 import types_pb2
from tokenmill_cli.exits import ExitCode
from tokenmill_cli.filters import Words
from tokenmill_client import Client, InvalidRequest, Lane, RequestState

from tests.unit.client.conftest import Run, submit
from tests.unit.client.fake_server import FakeServer


def listed(run: Run, *options: str) -> list[str]:
    return [info["request_id"] for info in json.loads(run("requests", "list", "--json", *options)[1])]


def test_lists_by_lane_age_and_order(server: FakeServer, run: Run) -> None:
    submit(server, "a", lane=Lane.BATCH, priority=1)
    submit(server, "b", lane=Lane.REAL_TIME, priority=5, queue_timeout=2.5)
    submit(server, "c", priority=3)
    assert server.requests["b"].spec.queue_timeout.ToMilliseconds() == 2500
    assert listed(run) == ["c", "b", "a"]
    assert listed(run, "--sort", "oldest") == ["a", "b", "c"]
    assert listed(run, "--sort", "priority") == ["b", "c", "a"]
    assert listed(run, "--lane", "batch", "--lane", "standard") == ["c", "a"]
    assert listed(run, "--lane", "BATCH,Real-Time") == ["b", "a"]
    assert listed(run, "--state", "Waiting,DECODE", "--state", "done") == ["c", "b", "a"]
    assert listed(run, "--state", "waiting,done") == []
    assert listed(run, "--priority-min", "2", "--priority-max", "4") == ["c"]
    assert (len(listed(run, "--min-age", "59m")), len(listed(run, "--min-age", "1h"))) == (3, 0)
    code, _, err = run("requests", "list", "--min-age", "soon")
    assert (code, "no age such as 90s" in err) == (ExitCode.USAGE, True)
    assert "real_time" in run("requests", "get", "b")[1]


def test_words_that_are_no_state_and_no_lane_are_told_which_there_are(run: Run) -> None:
    for option, words in (
        ("--state=waiting,happy", "'happy' is none of waiting, prefill, decode, preempted, done, cancelled, expired, failed"),
        ("--state=waiting,", "'' is none of waiting"),
        ("--lane=fast", "'fast' is none of real_time, standard, batch"),
    ):
        code, out, err = run("requests", "list", option)
        assert (code, out) == (ExitCode.USAGE, "")
        assert words in " ".join(err.split())


def test_words_are_completed_one_after_another() -> None:
    words = Words(RequestState, "STATE")
    context, option = click.Context(click.Command("list")), click.Option(["--state"])
    assert [item.value for item in words.shell_complete(context, option, "waiting,PRE")] == ["waiting,prefill", "waiting,preempted"]


def test_a_request_of_several_choices_is_shown_with_them_all(server: FakeServer, run: Run) -> None:
    submit(server, "a", n=2)
    out = run("requests", "get", "a", "--text")[1]
    assert [line.split()[:3] for line in out.splitlines() if "a/1" in line] == [["1", "a/1", "decode"]]
    assert "[0] " in out
    assert "[1] " in out
    document = json.loads(run("requests", "get", "a", "--json")[1])
    assert [part["info"]["request_id"] for part in document["choices"]] == ["a", "a/1"]


def test_list_watch_into_a_pipe_prints_changes(server: FakeServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(server, "a", "b", tenant="t")
    submit(server, "c")
    looks = ["again"]

    def sleep(interval_s: float) -> None:
        if not looks:
            raise KeyboardInterrupt
        looks.pop()
        server.requests["a"].info.priority = 9

    monkeypatch.setattr("tokenmill_cli.watching.time.sleep", sleep)
    code, out, _ = run("requests", "list", "--watch", "--tenant", "t", "--sort", "oldest")
    assert code == ExitCode.INTERRUPTED
    assert [line.split()[:4] for line in out.splitlines()] == [
        ["a", "decode", "priority", "0"],
        ["b", "decode", "priority", "0"],
        ["a", "decode", "priority", "9"],
    ]


def test_policy_show_set_reset(server: FakeServer, run: Run) -> None:
    assert "by the settings" in run("policy", "show")[1]
    assert run("policy", "set", "sjf", "--fair-share", "--reason", "short ones")[1] == "The policy is changed.\n"
    assert run("policy", "set", "sjf")[1] == "The policy was so already.\n"
    assert run("policy", "set", "--lane-shares", "real_time=55,batch=0")[1] == "The policy is changed.\n"
    shown = json.loads(run("policy", "show", "--json")[1])
    assert (shown["policy"], shown["fair_share"]) == ("sjf", True)
    assert shown["lane_shares"] == {"real_time": 55, "standard": 40, "batch": 0}
    assert run("policy", "reset")[1] == "The policy is that of the settings.\n"
    assert run("policy", "reset")[1] == "No policy was set.\n"


@pytest.mark.parametrize("arguments", [(), ("--lane-shares", "fast=1"), ("--lane-shares", "batch=x")])
def test_a_policy_that_says_nothing_is_a_wrong_command_line(run: Run, arguments: tuple[str, ...]) -> None:
    assert run("policy", "set", *arguments)[0] == 2


def test_lane_shares_that_no_lane_can_have_are_refused(server: FakeServer) -> None:
    for shares in ({"fast": 1}, {"batch": -1}):
        with Client(server.address) as client, pytest.raises(InvalidRequest, match="lane_shares"):
            client.admin.set_policy(lane_shares=shares)


def test_queue_pause_status_resume(server: FakeServer, run: Run) -> None:
    assert run("queue", "status")[1].split() == ["queue", "open", "waiting", "0", "running", "1"]
    assert "queue" not in run("load")[1]
    assert run("queue", "pause", "--reason", "new model")[1] == "The queue is paused.\n"
    assert run("queue", "pause")[1] == "The queue was paused already.\n"
    assert "paused by ann: new model" in run("queue", "status")[1]
    assert json.loads(run("queue", "status", "--json")[1])["queue_pause_reason"] == "by ann: new model"
    assert "paused by ann: new model" in run("load")[1]
    assert json.loads(run("queue", "resume", "--json")[1]) == {"changed": True}
    assert run("queue", "resume")[1] == "The queue was not paused.\n"


def test_retry_prints_the_new_id(server: FakeServer, run: Run) -> None:
    submit(server, "a")
    assert run("requests", "retry", "a") == (ExitCode.REFUSED, "", "Error: Request a has not failed.\n")
    server.requests["a"].info.state = types_pb2.REQUEST_STATE_FAILED
    assert run("requests", "retry", "a", "--reason", "mended") == (0, "a-again\n", "")
    assert json.loads(run("requests", "retry", "a", "--json")[1]) == {"request_id": "a-again", "retry_of": "a"}
    assert run("requests", "retry", "nobody")[0] == ExitCode.NOT_FOUND


def test_drain_and_undrain(server: FakeServer, run: Run) -> None:
    code, out, _ = run("executors", "drain", "x1", "--reason", "new driver")
    assert code == 0
    assert ["drained", "yes"] in [line.split() for line in out.splitlines()]
    assert json.loads(run("executors", "undrain", "x1", "--json")[1])["draining"] is False
    assert server.calls[-2:] == ["DrainExecutor x1", "UndrainExecutor x1"]
    # The scheduler has not seen it yet.
    assert run("executors", "undrain", "x1")[1].split() == ["name", "x1", "connected", "no"]


def test_actions_of_all_and_of_one(server: FakeServer, run: Run) -> None:
    submit(server, "a")
    run("requests", "prioritize", "a", "3", "--reason", "important")
    run("executors", "drain", "x1")
    code, out, _ = run("actions", "list")
    assert code == 0
    assert [line.split()[2:] for line in out.splitlines()[1:]] == [
        ["ann", "drain_executor", "x1", "detail"],
        ["ann", "update", "a", "detail;", "important"],
    ]
    (action,) = json.loads(run("actions", "list", "--target", "x1", "--json")[1])
    assert (action["actor"], action["verb"], action["at"]) == ("ann", "drain_executor", "2026-01-02T03:04:05+00:00")
    assert len(json.loads(run("actions", "list", "--limit", "1", "--json")[1])) == 1
    assert "important" in run("requests", "get", "a")[1]
    assert [done["verb"] for done in json.loads(run("requests", "get", "a", "--json")[1])["actions"]] == ["update"]


def test_prioritize_by_condition_asks_first(server: FakeServer, run: Run) -> None:
    submit(server, "a", "b", tenant="t")
    submit(server, "c")
    code, _, err = run("requests", "prioritize", "--tenant", "t", "5", stdin="n\n")
    assert (code, "Change 2 requests?" in err) == (ExitCode.INTERRUPTED, True)
    assert server.requests["a"].info.priority == 0
    code, out, _ = run("requests", "prioritize", "--tenant", "t", "-5", "--yes")
    assert (code, len(out.splitlines())) == (0, 3)
    assert [server.requests[name].info.priority for name in "abc"] == [-5, -5, 0]
    for wrong in ((), ("a",), ("a", "b"), ("--tenant", "t", "5", "6")):
        assert run("requests", "prioritize", *wrong)[0] == ExitCode.USAGE


def test_prioritize_says_when_the_policy_does_not_heed_priorities(server: FakeServer, run: Run) -> None:
    submit(server, "a")
    code, _, err = run("requests", "prioritize", "a", "5")
    assert (code, err) == (0, "Policy fcfs orders the queue without priorities: see `tokenmill policy set priority`.\n")
    assert run("requests", "prioritize", "a", "--deadline-in", "60")[2] == ""
    run("policy", "set", "priority")
    assert run("requests", "prioritize", "a", "6")[2] == ""


def test_prioritize_by_condition_passes_over_what_ends_meanwhile(
    server: FakeServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(server, "a", "b", tenant="t")
    server.policy.policy.policy = "priority"

    def asked(*_: object, **__: object) -> bool:
        with Client(server.address) as client:
            client.cancel("b")
        return True

    monkeypatch.setattr(click, "confirm", asked)
    code, out, err = run("requests", "prioritize", "--tenant", "t", "5")
    assert (code, [line.split()[0] for line in out.splitlines()[1:]]) == (0, ["a"])
    assert err == "1 of 2 had ended before they were changed.\n"
    assert [server.requests[name].info.priority for name in "ab"] == [5, 0]


def test_actions_come_page_by_page(server: FakeServer) -> None:
    with Client(server.address) as client:
        for number in range(5):
            client.admin.drain_executor(f"x{number}")
        targets = [action.target for action in client.admin.list_actions(page_size=2)]
    assert targets == ["x4", "x3", "x2", "x1", "x0"]
    assert server.calls.count("ListActions") == 3
