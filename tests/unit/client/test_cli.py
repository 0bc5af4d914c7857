"""The command line against a fake scheduler: what it prints, what it sends, how it exits."""

from __future__ import annotations

import io
import json
import re
from datetime import UTC, datetime

import grpc
import pytest
from rich.console import Console
from tokenmill_cli.exits import ExitCode, command_error
from tokenmill_client import Client, Unavailable
from tokenmill_client.errors import ErrorDetails

from tests.unit.client.conftest import Run, submit
from tests.unit.client.fake_server import FakeServer, bad_request, queue_full, token, whole_text

# ---- generate ------------------------------------------------------------------------------------------------------------------


def test_generate_prints_the_text(run: Run) -> None:
    assert run("generate", "hello", "--request-id", "r", "-m", "4") == (0, whole_text("r", 4) + "\n", "")


def test_generate_tells_of_an_outage_that_lasts(server: FakeServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_client.stream._TOLD_AFTER_S", 0.0)
    server.cuts = [3]
    code, out, err = run("generate", "hello", "--request-id", "r", "-m", "4")
    assert (code, out) == (0, whole_text("r", 4) + "\n")
    assert re.search(r"\[stream of request r waits for a scheduler at token 2: .*\]\n\n\[.* taken up again at token 2 after", err)


def test_generate_reads_standard_input(server: FakeServer, run: Run) -> None:
    assert run("generate", "--request-id", "r", stdin="two\nlines\n")[0] == 0
    assert server.requests["r"].spec.prompt.text == "two\nlines"
    run("generate", "-", "--request-id", "s", stdin="dash")
    assert server.requests["s"].spec.prompt.text == "dash"


@pytest.mark.parametrize("of_locale", ["strict", "surrogateescape"])
def test_standard_input_that_is_no_text(server: FakeServer, run: Run, monkeypatch: pytest.MonkeyPatch, of_locale: str) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8", of_locale)
    monkeypatch.setattr("tests.unit.client.test_cli.io.StringIO", lambda text: stdin)
    code, _, err = run("generate")
    assert (code, "not UTF-8 text" in err, server.calls) == (ExitCode.USAGE, True, [])


def test_generate_as_json(run: Run) -> None:
    code, out, _ = run("generate", "hello", "--request-id", "r", "-m", "2", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["text"] == whole_text("r", 2)
    assert document["token_ids"] == [token("r", 0), token("r", 1)]
    assert document["usage"] == {"prompt_tokens": 3, "output_tokens": 2, "cached_tokens": 0}
    assert document["finish_reason"] == "length"


def test_generate_token_ids_in_and_out(server: FakeServer, run: Run) -> None:
    code, out, _ = run("generate", "--token-ids", "[1, 2  3]", "--request-id", "r", "-m", "3")
    assert (code, out.split()) == (0, [str(token("r", index)) for index in range(3)])
    assert list(server.requests["r"].spec.prompt.token_ids.ids) == [1, 2, 3]


def test_generate_chat(server: FakeServer, run: Run) -> None:
    run("generate", "hi", "--system", "be brief", "--request-id", "r")
    turns = server.requests["r"].spec.prompt.chat.messages
    assert [(turn.role, turn.content) for turn in turns] == [("system", "be brief"), ("user", "hi")]


def test_generate_passes_options_on(server: FakeServer, run: Run) -> None:
    run(
        *("generate", "hi", "--request-id", "r", "-t", "0", "--top-k", "5", "--seed", "7", "--stop", "A", "--stop", "B"),
        *("--logit-bias", "4:-1.5", "--stop-token-id", "9", "--ignore-eos", "--priority", "-3", "--tenant", "t", "--detached"),
    )
    spec = server.requests["r"].spec
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, list(sampling.stop)) == (0, 5, 7, ["A", "B"])
    assert sampling.HasField("temperature")
    assert (dict(sampling.logit_bias), list(sampling.stop_token_ids), sampling.ignore_eos) == ({4: -1.5}, [9], True)
    assert (spec.priority, spec.tenant, spec.detached) == (-3, "t", True)
    assert not sampling.HasField("top_p")


def test_c72_generate_goes_on_after_a_cut(server: FakeServer, run: Run) -> None:
    server.cuts = [3]
    assert run("generate", "hello", "--request-id", "r", "-m", "4") == (0, whole_text("r", 4) + "\n", "")


def test_generate_of_a_request_that_is_cancelled(server: FakeServer, run: Run) -> None:
    submit(server, "r")
    run("requests", "cancel", "r")
    server.requests["r"].info.error = "cancelled by an operator"
    # Submitted again with the same payload: it joins the cancelled one.
    server.requests["r"].spec.sampling.SetInParent()
    code, _, err = run("generate", "a", "--request-id", "r")
    assert (code, err) == (1, "Error: Request r: cancelled by an operator\n")
    server.requests["r"].info.error = ""
    assert run("generate", "a", "--request-id", "r")[2] == "Error: Request r is cancelled.\n"


@pytest.mark.parametrize(
    "argv",
    [
        ("generate", "x", "--token-ids"),
        ("generate", "1 2", "--token-ids", "--chat"),
        ("generate", "x", "--logit-bias", "much"),
        ("generate", "x", "--top-k", "many"),
        ("requests", "cancel"),
        ("requests", "cancel", "a", "--tenant", "t"),
        ("requests", "prioritize", "a"),
        ("requests", "list", "--state", "happy"),
        ("nonsense",),
    ],
)
def test_wrong_command_lines(server: FakeServer, run: Run, argv: tuple[str, ...]) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (ExitCode.USAGE, "")
    assert "Error: " in err
    assert server.calls == []


# ---- errors --------------------------------------------------------------------------------------------------------------------


def test_nothing_answers(run: Run) -> None:
    code, out, err = run("--server", "127.0.0.1:1", "load")
    assert (code, out) == (ExitCode.UNAVAILABLE, "")
    assert err == "Error: Nothing answers at 127.0.0.1:1. Start it with `tokenmill serve all`, or name another with --server.\n"


def test_a_refused_request(server: FakeServer, run: Run) -> None:
    server.refuse(grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p must be in (0, 1].", bad_request(("sampling.top_p", "wrong")))
    assert run("generate", "x", "--top-p", "7") == (ExitCode.REFUSED, "", "Error: sampling.top_p must be in (0, 1].\n")


def test_c38_a_full_queue(server: FakeServer, run: Run) -> None:
    server.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "The queue is full.", queue_full(2))
    code, _, err = run("generate", "x")
    assert (code, err) == (ExitCode.REFUSED, "Error: The queue is full. Try again in 2 s.\n")


def test_whoever_runs_is_not_to_be_started() -> None:
    error = command_error(Unavailable("no executor has connected yet", details=ErrorDetails(retry_delay_s=2)))
    assert (error.code, error.message) == (ExitCode.UNAVAILABLE, "no executor has connected yet: try again in 2 s.")


def test_another_service_at_the_address(server: FakeServer, run: Run) -> None:
    server.refuse(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    code, _, err = run("load")
    assert code == ExitCode.FAILURE
    assert "--server" in err


def test_an_unknown_request(run: Run) -> None:
    for argv in (("requests", "get", "x"), ("requests", "cancel", "x"), ("requests", "prioritize", "x", "1")):
        assert run(*argv)[0] == ExitCode.NOT_FOUND


def test_a_value_that_no_message_can_hold(server: FakeServer, run: Run) -> None:
    code, _, err = run("generate", "x", "--seed", "-1")
    assert code == ExitCode.REFUSED
    assert err.startswith("Error: sampling.seed: ")
    assert server.calls == []


def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_client.blocking.Admin.get_load", interrupt)
    assert run("load")[0] == ExitCode.INTERRUPTED


# ---- requests ------------------------------------------------------------------------------------------------------------------


def test_list_as_table_and_json(server: FakeServer, run: Run) -> None:
    submit(server, "a", "b", priority=2, tenant="t")
    code, out, _ = run("requests", "list")
    head, *lines = out.splitlines()
    assert code == 0
    assert head.split() == ["REQUEST", "STATE", "LANE", "PRIO", "TOKENS", "AGE", "TENANT"]
    assert [line.split()[:4] for line in lines] == [["b", "decode", "standard", "2"], ["a", "decode", "standard", "2"]]
    assert "\x1b" not in out
    documents = json.loads(run("requests", "list", "--output", "json", "--sort", "oldest")[1])
    assert [document["request_id"] for document in documents] == ["a", "b"]
    assert documents[0]["submitted_at"] == "2026-01-02T03:04:05+00:00"


def test_list_filters_and_limits(server: FakeServer, run: Run) -> None:
    submit(server, *(f"r{number}" for number in range(5)))
    submit(server, "x", tenant="other", priority=5)
    assert [row["request_id"] for row in json.loads(run("--json", "requests", "list", "--limit", "2")[1])] == ["x", "r4"]
    assert len(json.loads(run("requests", "list", "--limit", "0", "--json")[1])) == 6
    assert [row["request_id"] for row in json.loads(run("requests", "list", "--tenant", "other", "--json")[1])] == ["x"]
    assert len(json.loads(run("requests", "list", "--priority-max", "0", "--json")[1])) == 5
    assert json.loads(run("requests", "list", "--state", "done", "--json")[1]) == []


def test_get_tells_a_requests_life(server: FakeServer, run: Run) -> None:
    run("generate", "x", "--request-id", "r", "-m", "2")
    code, out, _ = run("requests", "get", "r", "--text")
    assert code == 0
    for words in (("state", "done"), ("tokens", "3 prompt, 2 output"), ("+0.000 s", "prefill", "admitted")):
        assert any(all(word in line for word in words) for line in out.splitlines())
    assert out.endswith(whole_text("r", 2) + "\n")
    document = json.loads(run("requests", "get", "r", "--json")[1])
    assert document["info"]["state"] == "done"
    assert [move["after"] for move in document["transitions"]] == ["waiting", "prefill"]


def test_cancel_by_id(server: FakeServer, run: Run) -> None:
    submit(server, "a", "b")
    code, out, _ = run("requests", "cancel", "a")
    assert (code, out.splitlines()[1].split()) == (0, ["a", "cancelled"])
    code, out, err = run("requests", "cancel", "a", "b", "nobody")
    assert [line.split(maxsplit=1)[1].strip() for line in out.splitlines()[1:]] == ["already cancelled", "cancelled", "not found"]
    assert (code, err) == (ExitCode.NOT_FOUND, "Error: 1 of 3 request ids are not known: see `requests list`.\n")


def test_cancel_by_condition_asks_first(server: FakeServer, run: Run) -> None:
    submit(server, "a", "b", tenant="t")
    submit(server, "c")
    code, _, err = run("requests", "cancel", "--tenant", "t", stdin="n\n")
    assert code == ExitCode.INTERRUPTED
    assert "Cancel 2 requests?" in err
    assert server.calls[-1] == "CancelRequests dry"
    code, out, _ = run("requests", "cancel", "--tenant", "t", "--dry-run")
    assert (code, out.count("would be cancelled")) == (0, 2)
    code, out, _ = run("requests", "cancel", "--tenant", "t", "--yes")
    assert (code, out.count("cancelled")) == (0, 2)
    assert not server.requests["c"].ended.is_set()
    code, out, _ = run("requests", "cancel", "--tenant", "nobody", "--yes")
    assert (code, out) == (0, "No request meets the conditions.\n")


def test_prioritize(server: FakeServer, run: Run) -> None:
    submit(server, "a")
    assert run("requests", "prioritize", "a", "-7")[0] == 0
    assert server.requests["a"].info.priority == -7
    before = datetime.now(UTC)
    code, out, _ = run("requests", "prioritize", "a", "--deadline-in", "60", "--json")
    document = json.loads(out)
    assert (code, document["priority"]) == (0, -7)
    assert 55 < (datetime.fromisoformat(document["deadline"]) - before).total_seconds() < 120
    run("requests", "cancel", "a")
    assert run("requests", "prioritize", "a", "1") == (ExitCode.REFUSED, "", "Error: Request a has ended.\n")


def test_watch_one_to_its_end(run: Run) -> None:
    run("generate", "x", "--request-id", "r")
    code, out, _ = run("requests", "watch", "r", "--interval", "0.05")
    assert code == 0
    assert [line.split()[2:] for line in out.splitlines()] == [["waiting", "submitted"], ["prefill", "admitted"]]


def test_watch_all_prints_changes_until_interrupted(server: FakeServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(server, "a", "b")
    to_cancel = ["a", None]

    def sleep(interval_s: float) -> None:
        if not to_cancel:
            raise KeyboardInterrupt
        if request_id := to_cancel.pop(0):
            with Client(server.address) as client:
                client.cancel(request_id)

    monkeypatch.setattr("tokenmill_cli.watching.time.sleep", sleep)
    code, out, _ = run("requests", "watch")
    assert code == ExitCode.INTERRUPTED
    assert [line.split()[:2] for line in out.splitlines()] == [["a", "decode"], ["b", "decode"], ["a", "cancelled"]]


def test_watch_on_a_terminal_shows_a_table(server: FakeServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(server, *(f"r{number}" for number in range(30)))
    terminal = Console(force_terminal=True, highlight=False, width=80, height=12, file=io.StringIO())
    monkeypatch.setattr("tokenmill_cli.watching.console", lambda: terminal)
    monkeypatch.setattr("tokenmill_cli.commands.requests.console", lambda: terminal)
    monkeypatch.setattr("tokenmill_cli.watching.time.sleep", interrupt)
    assert run("requests", "watch")[0] == ExitCode.INTERRUPTED
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "1 running, 0 waiting, KV 0%" in shown
    assert "r0" in shown
    assert "… and 22 more" in shown


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# ---- the rest ------------------------------------------------------------------------------------------------------------------


def test_executors_load_and_models(run: Run) -> None:
    code, out, _ = run("executors", "list")
    assert code == 0
    assert "4 held, 0 cached, 60 free of 64, 16 tokens each" in out
    assert json.loads(run("executors", "list", "--json")[1])[0]["epoch"] == 3
    assert "continuous, fcfs" in run("load")[1]
    assert json.loads(run("load", "--json")[1])["max_num_seqs"] == 8
    assert run("models", "list")[1].splitlines()[1].split() == ["oracle", "2048", "50000", "no", "1"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(run: Run, shell: str) -> None:
    code, out, _ = run("completion", shell)
    assert code == 0
    assert "_TOKENMILL_COMPLETE" in out


def test_help_lists_every_command_and_the_exit_codes(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in ("serve", "generate", "requests", "executors", "queue", "actions", "load", "models", "db", "bench", "demo"):
        assert command in out
    assert "130 interrupted" in out
    # No command's line is cut short.
    assert "..." not in out.partition("Commands:")[2]


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert (code, out.split()[-1].count(".")) == (0, 2)


def test_health_says_whether_the_server_is_ready(run: Run, server: FakeServer) -> None:
    code, out, _ = run("health")
    assert code == ExitCode.OK
    assert "is ready" in out
    server.serving = False
    code, out, _ = run("health", server.address, "--json")
    assert code == ExitCode.UNAVAILABLE
    assert json.loads(out) == {"address": server.address, "service": "", "serving": False}
    assert run("health", "127.0.0.1:1")[0] == ExitCode.UNAVAILABLE
    server.serving = True
    assert run("health", "--service", "unknown.Service")[0] == ExitCode.UNAVAILABLE


def test_a_server_that_is_no_address_is_a_wrong_command_line(run: Run) -> None:
    code, _, err = run("load", "--server", "nonsense")
    assert code == ExitCode.USAGE
    assert "'nonsense' is neither HOST:PORT nor unix:PATH" in err
