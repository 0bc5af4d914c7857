"""Other servers, each installed into an environment of its own and sent the speed benchmark's workloads.

What cannot be installed or run here says why instead of having figures.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.speed.peers.llama_cpp import LlamaCpp
from benchmarks.speed.peers.openvino import OpenVino
from benchmarks.speed.peers.peer import Peer, PeerError, PeerMeasured
from benchmarks.speed.peers.vllm import Vllm
from benchmarks.speed.workloads import SEED, WARM_UP, WARM_UP_SCALE, Run, Workload

__all__ = ["PEERS", "PeerMeasured", "measure_peer"]

# Each makes the peer, given the folder for environments and models.
PEERS: Mapping[str, Callable[[Path], Peer]] = {
    "vllm": Vllm,
    "openvino": lambda folder: OpenVino(folder, "F16"),
    "openvino-q8": lambda folder: OpenVino(folder, "Q8_0"),
    "llama.cpp": lambda folder: LlamaCpp(folder, "BF16"),
    "llama.cpp-q8": lambda folder: LlamaCpp(folder, "Q8_0"),
}


def measure_peer(name: str, folder: Path, workloads: Sequence[Workload], repeat: int, length_scale: float) -> PeerMeasured:
    folder.mkdir(parents=True, exist_ok=True)
    peer = PEERS[name](folder.resolve())
    runs: dict[str, list[Run]] = {}
    try:
        peer.install()
        for slots, group in groupby(workloads, key=lambda workload: workload.slots):
            with peer.serving(slots) as send:
                send(WARM_UP, SEED - 1, WARM_UP_SCALE)
                for workload in group:
                    runs[workload.name] = [send(workload, SEED + number, length_scale) for number in range(repeat)]
    except (PeerError, OSError, subprocess.SubprocessError) as error:
        return PeerMeasured(peer.name, f"does not run here: {error}", runs)
    return PeerMeasured(peer.name, peer.how, runs)
