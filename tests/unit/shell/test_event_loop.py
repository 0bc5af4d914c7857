"""gRPC reads its settings when it is imported: the services, and the command line, must have made theirs by then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_IMPORT = """
import importlib.abc, os, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"))
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Watch())
for name in sys.argv[1:]:
    __import__(name)
"""


@pytest.mark.parametrize(
    "modules", [["tokenmill_scheduler.__main__"], ["tokenmill_executor.__main__"], ["tokenmill_cli.main", "tokenmill_client"]]
)
@pytest.mark.parametrize(("given", "seen"), [(None, "-event_engine_client"), ("mine", "mine")])
def test_grpc_is_set_up_before_it_is_imported(modules: list[str], given: str | None, seen: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    if given is not None:
        environment["GRPC_EXPERIMENTS"] = given
    run = subprocess.run([sys.executable, "-c", _IMPORT, *modules], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(seen)
