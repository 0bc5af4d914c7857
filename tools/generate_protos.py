"""Regenerates the Python code beside every .proto under `protos/`; with `--check`, fails when the committed code differs."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"
GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(into: Path) -> None:
    sources = [str(path.relative_to(PROTOS)) for path in sorted(PROTOS.rglob("*.proto"))]
    well_known = str(resources.files("grpc_tools") / "_proto")
    outputs = [f"--{plugin}_out={into}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")]
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *outputs, *sources]) != 0:
        sys.exit("protoc failed")
    for path in into.rglob("*_pb2_grpc.py*"):  # a service-less file gets an empty stub, which says nothing
        service_less = "\nservice " not in (PROTOS / path.relative_to(into)).with_name(_proto_name(path)).read_text()
        if service_less:
            path.unlink()


def _proto_name(generated: Path) -> str:
    return generated.name.split("_pb2_grpc")[0] + ".proto"


def generated_files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.name.endswith(GENERATED_SUFFIXES)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(PROTOS)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = generated_files(Path(scratch)), generated_files(PROTOS)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if stale:
        sys.exit(f"generated code is stale; run `make protos`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
