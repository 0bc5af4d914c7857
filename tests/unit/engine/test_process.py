"""The executor as a process: starts without torch, tells its address, ends on SIGTERM, explains an operator's mistake."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill.executor.v1.executor_pb2_grpc import ExecutorServiceStub

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


def command(*flags: str, model: str = "simulated") -> list[str]:
    return [sys.executable, "-c", WITHOUT_TORCH, "--model", model, "--log-format=json", *flags]


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    port_file = f"--port-file={tmp_path / 'port'}"
    process = subprocess.Popen(command("--listen=127.0.0.1:0", port_file), stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def wait_for(process: subprocess.Popen[str], event: str) -> dict[str, str]:
    assert process.stderr is not None
    for line in process.stderr:
        record: dict[str, str] = json.loads(line)
        if record["event"] == event:
            return record
    raise AssertionError(f"the process ended without {event!r}")


def test_it_serves_without_torch_and_ends_on_sigterm(executor: subprocess.Popen[str], tmp_path: Path) -> None:
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


def test_a_second_process_cannot_take_the_port(executor: subprocess.Popen[str]) -> None:
    address = wait_for(executor, "ready")["address"]
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
