"""The executor as a process: starts without torch, tells its address, ends on SIGTERM, explains an operator's mistake."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import grpc
import pytest
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill.executor.v1.executor_pb2_grpc import ExecutorServiceStub

from tests.unit.engine.scheduler import admission

# Stands in for an environment without torch and what comes with it.
WITHOUT_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "safetensors", "gguf", "tokenizers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from tokenmill_executor.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


LOSING_ITS_DEVICE = """
import sys
from tokenmill_executor.__main__ import main
from tokenmill_executor.runner import DeviceLost
from tokenmill_executor.simulated import SimulatedRunner
def step(runner, batch):
    raise DeviceLost("it fell off the bus")
SimulatedRunner.step = step
sys.exit(main(sys.argv[1:]))
"""


def command(*flags: str, model: str = "simulated") -> list[str]:
    return [sys.executable, "-c", WITHOUT_TORCH, "--model", model, "--log-format=json", *flags]


Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch() -> Iterator[Launch]:
    running: list[subprocess.Popen[str]] = []

    def launch(*flags: str) -> subprocess.Popen[str]:
        running.append(subprocess.Popen(command(*flags), stderr=subprocess.PIPE, text=True))
        return running[-1]

    yield launch
    for process in running:
        process.kill()
        process.communicate()


def forever() -> Iterator[pb.RunRequest]:
    """Keeps the client's side of a stream open until its channel closes."""
    threading.Event().wait(60)
    yield from ()


def wait_for(process: subprocess.Popen[str], event: str) -> dict[str, str]:
    assert process.stderr is not None
    for line in process.stderr:
        record: dict[str, str] = json.loads(line)
        if record["event"] == event:
            return record
    raise AssertionError(f"the process ended without {event!r}")


def test_it_serves_without_torch_and_ends_on_sigterm(launch: Launch, tmp_path: Path) -> None:
    executor = launch("--listen=127.0.0.1:0", f"--port-file={tmp_path / 'port'}")
    address = wait_for(executor, "ready")["address"]
    assert (tmp_path / "port").read_text() == address
    with grpc.insecure_channel(address) as channel:
        stub = ExecutorServiceStub(channel)
        assert stub.Describe(pb.DescribeRequest()).model == "simulated"
        responses = iter(stub.Run(iter([pb.RunRequest(hello=pb.Hello(epoch=1))])))
        assert next(responses).welcome.epoch == 1
    executor.send_signal(signal.SIGTERM)
    wait_for(executor, "stopped")
    assert executor.wait(30) == 0


def test_a_step_that_outlasts_the_grace_period_is_abandoned(launch: Launch, tmp_path: Path) -> None:
    executor = launch(f"--listen=unix:{tmp_path}/x.sock", "--simulated-step-ms=600000", "--shutdown-timeout-s=0")
    plan = pb.Plan(epoch=1, plan_id=1, admit=[admission(1, [5])], advance_sequence_ids=[1], advance_max_tokens=[1])
    with grpc.insecure_channel(wait_for(executor, "ready")["address"]) as channel:
        requests = iter([pb.RunRequest(hello=pb.Hello(epoch=1)), pb.RunRequest(plan=plan)])
        responses = iter(ExecutorServiceStub(channel).Run(chain(requests, forever())))
        while next(responses).heartbeat.running_plan_id != 1:
            pass
        executor.send_signal(signal.SIGTERM)
        wait_for(executor, "abandoned")
        assert executor.wait(30) == 0


def test_c43_a_process_whose_device_is_lost_ends_with_exit_code_1(tmp_path: Path) -> None:
    """So that whoever watches over it starts another, and its scheduler plans the sequences elsewhere meanwhile."""
    flags = ["--model=simulated", f"--listen=unix:{tmp_path}/x.sock", "--log-format=json"]
    plan = pb.Plan(epoch=1, plan_id=1, admit=[admission(1, [5])], advance_sequence_ids=[1], advance_max_tokens=[1])
    with subprocess.Popen([sys.executable, "-c", LOSING_ITS_DEVICE, *flags], stderr=subprocess.PIPE, text=True) as executor:
        with grpc.insecure_channel(wait_for(executor, "ready")["address"]) as channel:
            requests = iter([pb.RunRequest(hello=pb.Hello(epoch=1)), pb.RunRequest(plan=plan)])
            with pytest.raises(grpc.RpcError, match="lost its device"):
                list(ExecutorServiceStub(channel).Run(chain(requests, forever())))
        wait_for(executor, "stopped")
    assert executor.returncode == 1


def test_a_killed_process_leaves_its_unix_path_to_the_next(launch: Launch, tmp_path: Path) -> None:
    listen = f"--listen=unix:{tmp_path}/x.sock"
    first = launch(listen)
    wait_for(first, "ready")
    first.kill()
    first.wait()
    address = wait_for(launch(listen), "ready")["address"]
    with grpc.insecure_channel(address) as channel:
        assert ExecutorServiceStub(channel).Describe(pb.DescribeRequest()).epoch == 0


def test_a_second_process_cannot_take_the_port(launch: Launch) -> None:
    address = wait_for(launch("--listen=127.0.0.1:0"), "ready")["address"]
    second = subprocess.run(command(f"--listen={address}"), capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert f"--listen {address} cannot be bound" in second.stderr


@pytest.mark.parametrize(
    ("flags", "model", "words"),
    [
        (["--listen=nowhere"], "simulated", "--listen nowhere is neither HOST:PORT nor unix:PATH"),
        (["--listen=127.0.0.1:0"], __file__, "is missing, which a real model needs: pip install 'tokenmill[executor]'"),
    ],
)
def test_an_operators_mistake_is_one_sentence_and_exit_code_2(flags: list[str], model: str, words: str) -> None:
    process = subprocess.run(command(*flags, model=model), capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith("tokenmill_executor: ")
    assert process.stderr.endswith(f"{words}\n")
    assert "Traceback" not in process.stderr
