"""The command line as a user runs it: real processes all the way."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tokenmill_cli.exits import ExitCode
from tokenmill_client import Client, NotFound

from tests.e2e.commands import TIMEOUT_S, Running, tokenmill
from tests.fakes.calls import foretold
from tests.fakes.certificates import Authority
from tests.fakes.models import smollm2_path

# A request of 4,000 tokens is still at work when four commands have been started one after the other on a busy machine.
SIMULATED = ("--model", "simulated", "--simulated-step-ms", "10")
ANYWHERE = ("--listen", "127.0.0.1:0", "--executor-listen", "127.0.0.1:0")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `serve all`."""
    folder = tmp_path_factory.mktemp("serve")
    with Running("serve", "all", *SIMULATED, *ANYWHERE, cwd=folder) as running:
        yield running.expect(r"tokenmill is ready at (\S+)\. ")[1]


def wait_accepted(service: str, request_id: str) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    with Client(service) as client:
        while time.monotonic() < give_up_s:
            with suppress(NotFound):
                client.get_request(request_id)
                return
            time.sleep(0.02)
    raise AssertionError(f"{request_id} was never accepted")


def test_generate_from_argument_and_standard_input(service: str) -> None:
    done = tokenmill("generate", "--token-ids", "65 66", "-m", "10", "--seed", "1", TOKENMILL_SERVER=service)
    assert (done.returncode, [int(word) for word in done.stdout.split()]) == (0, foretold([65, 66], 10)), done.stderr
    done = tokenmill("--server", service, "generate", "-m", "10", "--seed", "1", "--json", stdin="AB\n")
    document = json.loads(done.stdout)
    with Client(service) as client:
        prompt = client.tokenize("AB").token_ids
    assert document["token_ids"] == foretold(prompt, 10)
    assert document["text"] == "".join(map(chr, document["token_ids"]))


def test_a_request_is_watched_and_cancelled_from_another_terminal(service: str) -> None:
    with Running("--server", service, "generate", "x", "-m", "4000", "--request-id", "long") as generating:
        wait_accepted(service, "long")
        with Running("--server", service, "requests", "watch", "long", "--interval", "0.1") as watching:
            watching.expect("decode")
            listed = json.loads(tokenmill("--server", service, "requests", "list", "--state", "decode", "--json").stdout)
            assert [info["request_id"] for info in listed] == ["long"]
            done = tokenmill("--server", service, "requests", "prioritize", "long", "7", "--json")
            assert json.loads(done.stdout)["priority"] == 7
            done = tokenmill("--server", service, "requests", "cancel", "--state", "decode", "--yes", "--reason", "enough")
            assert (done.returncode, "long  cancelled" in re.sub(" +", "  ", done.stdout)) == (0, True), done
            watching.expect("cancelled +enough")
            assert watching.wait() == 0
        assert generating.wait() == ExitCode.FAILURE
        generating.expect(r"Error: Request long is cancelled")
    life = json.loads(tokenmill("--server", service, "requests", "get", "long", "--json").stdout)
    assert [move["after"] for move in life["transitions"]] == ["waiting", "prefill", "decode", "cancelled"]


def test_c13_an_interrupted_generate_cancels_its_request(service: str) -> None:
    with Running("--server", service, "generate", "x", "-m", "4000", "--request-id", "interrupted") as generating:
        wait_accepted(service, "interrupted")
        with Running("--server", service, "requests", "watch", "interrupted", "--interval", "0.1") as watching:
            watching.expect("decode")
            generating.signal(signal.SIGINT)
            assert generating.wait() == ExitCode.INTERRUPTED
            watching.expect("cancelled")


def test_mistakes_and_what_is_missing(service: str) -> None:
    done = tokenmill("--server", service, "generate", "x", "--temperature", "-1")
    assert done.returncode == ExitCode.REFUSED
    assert "sampling.temperature" in done.stderr
    assert tokenmill("--server", service, "requests", "get", "nobody").returncode == ExitCode.NOT_FOUND
    assert tokenmill("--server", "127.0.0.1:1", "load").returncode == ExitCode.UNAVAILABLE


def test_operators_tables(service: str) -> None:
    assert "simulated" in tokenmill("--server", service, "executors", "list").stdout
    assert "continuous, fcfs" in tokenmill("--server", service, "load").stdout
    assert json.loads(tokenmill("--server", service, "models", "list", "--json").stdout)[0]["executors"] == 1


def test_serve_all_with_tls_and_tokens(tmp_path: Path) -> None:
    """From the environment too, which the executor must not take for its own."""
    authority = Authority(tmp_path / "authority")
    pair = authority.issue("served")
    made = tokenmill("auth", "create", "ann", "--tenant", "apple", "--json")
    drawn, entry = (json.loads(made.stdout)[part] for part in ("token", "entry"))
    tokens = tmp_path / "tokens.toml"
    tokens.write_text("[[token]]\n" + "".join(f'{key} = "{value}"\n' for key, value in entry.items()))
    served = {"TOKENMILL_TLS_CERT": str(pair.cert), "TOKENMILL_TLS_KEY": str(pair.key), "TOKENMILL_AUTH_TOKENS": str(tokens)}
    trusting = ("--tls-ca", str(authority.ca))
    with Running(*trusting, "serve", "all", *SIMULATED, *ANYWHERE, cwd=tmp_path, **served) as running:
        server = (*trusting, "--server", running.expect(r"tokenmill is ready at (\S+)\. ")[1])
        done = tokenmill(*server, "generate", "x", "-m", "3", "--request-id", "r", TOKENMILL_TOKEN=drawn)
        assert done.returncode == 0, done.stderr
        assert tokenmill(*server, "generate", "x").returncode == ExitCode.REFUSED
        refused = tokenmill(*server, "requests", "list", TOKENMILL_TOKEN=drawn)
        assert (refused.returncode, "needs the role operator" in refused.stderr) == (ExitCode.REFUSED, True)
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        assert drawn not in running.text


def test_serve_all_stops_both_and_keeps_the_database(tmp_path: Path) -> None:
    with Running("serve", "all", *SIMULATED, *ANYWHERE, cwd=tmp_path) as running:
        address = running.expect(r"tokenmill is ready at (\S+)\. ")[1]
        assert tokenmill("--server", address, "generate", "x", "-m", "3", "--request-id", "kept").returncode == 0
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        for name in ("scheduler", "executor"):
            running.expect(rf"{name} +\| .*stopped")
    assert tokenmill("db", "check", cwd=tmp_path).stdout == "current\n"
    # Where the executor's address is known the two start side by side.
    beside = ("--listen", "127.0.0.1:0", "--executor-listen", f"unix:{tmp_path}/executor.sock")
    with Running("serve", "all", *SIMULATED, *beside, cwd=tmp_path) as running:
        address = running.expect(r"tokenmill is ready at (\S+)\. ")[1]
        info = json.loads(tokenmill("--server", address, "requests", "get", "kept", "--json").stdout)["info"]
        assert (info["state"], info["usage"]["output_tokens"]) == ("done", 3)
        running.signal(signal.SIGINT)
        assert running.wait() == 0


@pytest.mark.parametrize("executor_listen", ["127.0.0.1:0", "unix:executor.sock"])
def test_serve_all_ends_with_the_code_of_the_one_that_failed(executor_listen: str, tmp_path: Path) -> None:
    anywhere = ("--listen", "127.0.0.1:0", "--executor-listen", executor_listen)
    done = tokenmill("serve", "all", "--model", "/no/such/model", *anywhere, cwd=tmp_path)
    assert done.returncode == ExitCode.USAGE
    assert "/no/such/model" in done.stderr
    assert "Traceback" not in done.stderr
    done = tokenmill("serve", "all", *SIMULATED, "--executor-listen", executor_listen, "--listen", "nowhere", cwd=tmp_path)
    assert done.returncode == ExitCode.USAGE
    assert "scheduler | tokenmill_scheduler: --listen nowhere" in done.stderr


def test_serve_all_ends_both_when_one_dies(tmp_path: Path) -> None:
    with Running("serve", "all", *SIMULATED, "--simulated-poison-token", "88", *ANYWHERE, cwd=tmp_path) as running:
        with Client(running.expect(r"tokenmill is ready at (\S+)\. ")[1]) as client:
            client.submit(token_ids=[88], max_tokens=1)
        assert running.wait() == 128 + signal.SIGKILL
        assert re.search(r"scheduler +\| .*stopped", running.text)


def test_serve_passes_flags_and_exit_codes_through(tmp_path: Path) -> None:
    assert "--simulated-step-ms" in tokenmill("serve", "executor", "--help").stdout
    assert "--batching" in tokenmill("serve", "scheduler", "--help").stdout
    done = tokenmill("serve", "scheduler", "--max-num-seqs", "none", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (ExitCode.USAGE, False)


def test_demo_into_a_pipe(tmp_path: Path) -> None:
    done = tokenmill("demo", "--model", "simulated", "--requests", "6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout)
    lines = done.stdout.splitlines()
    # The answer is one line, as long as the model makes it.
    assert [line for line in lines if len(line) > 80 and "Starting" in line] == []
    assert any(re.fullmatch(r"wall time +[\d.]+ s +[\d.]+ s +[\d.]+×", line) for line in lines), done.stdout
    assert sum(line.startswith(("static ", "continuous ")) for line in lines) == 2
    assert list(tmp_path.iterdir()) == []


def test_one_answer_of_the_real_model(tmp_path: Path) -> None:
    with Running("serve", "all", "--model", str(smollm2_path()), "--threads", "1", *ANYWHERE, cwd=tmp_path) as running:
        address = running.expect(r"tokenmill is ready at (\S+)\. ")[1]
        question = "Explain in two sentences why the sky is blue."
        done = tokenmill("--server", address, "generate", "--chat", question, "-t", "0", "-m", "5")
        assert (done.returncode, done.stdout) == (0, "The sky is blue because\n"), done.stderr


def test_an_ended_demo_stops_its_services(tmp_path: Path) -> None:
    """By a signal, as by itself: their folder goes when they are gone."""
    with Running("demo", "--model", "simulated", cwd=tmp_path, TMPDIR=str(tmp_path)) as running:
        running.expect("Starting a scheduler, static")
        assert any(tmp_path.iterdir())
        running.signal(signal.SIGTERM)
        assert running.wait() == ExitCode.INTERRUPTED
        assert "Traceback" not in running.text
    assert list(tmp_path.iterdir()) == []
