"""How fast the whole service is, client and all: the five workloads W1 to W5 on SmolLM2-135M, in bfloat16 and in int8.

    python -m benchmarks.speed [--precision bf16] [--workload W1] [--repeat 3] [--peers FOLDER] [--length-scale 0.1]

Executor and scheduler are processes, so is the client (`tokenmill bench`, over gRPC); the ledger is SQLite, durable against a power
cut. The same requests are run by the bare engine (`benchmarks.bare`), in turns with the service; the tables have medians. With
--peers, other servers are installed into environments of their own in FOLDER and get the same requests. Writes a table, a plot and
all figures to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tokenmill_service.logs import configure_logs

from benchmarks.speed.measure import measure
from benchmarks.speed.peers import PEERS, measure_peer
from benchmarks.speed.plot import draw
from benchmarks.speed.table import table
from benchmarks.speed.workloads import PRECISIONS, WORKLOADS
from benchmarks.tables import keep, table_path, today


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as the executor's --model")
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="may be repeated (default: all)")
    parser.add_argument("--workload", choices=names, action="append", help="may be repeated (default: all)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--length-scale", type=float, default=1.0, help="of prompts and outputs; bars count for 1 alone")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="measure other servers too, installed in here")
    parser.add_argument("--peer", choices=PEERS, action="append", help="which of them; may be repeated (default: all)")
    return parser


def main() -> None:
    options = parser().parse_args()
    configure_logs("console", "warning")
    workloads = [workload for workload in WORKLOADS if not options.workload or workload.name in options.workload]
    measured = []
    for precision in options.precision or PRECISIONS:
        for one in measure(options.model, precision, workloads, options.repeat, options.length_scale):
            measured.append(one)
            print(f"{precision} {one.workload.name}: {one.service[-1].tokens_per_s:,.0f} tokens/s", file=sys.stderr)
    peers = []
    if options.peers:
        for name in options.peer or PEERS:
            peers.append(measure_peer(name, options.peers, workloads, options.repeat, options.length_scale))
            print(peers[-1], file=sys.stderr)
    name = Path(options.model).stem
    report = table(name, options.repeat, options.length_scale, measured, peers)
    keep(f"speed-{name}", report)
    draw(f"{name}, {os.cpu_count()} cores, {today()}", measured, peers, table_path(f"speed-{name}").with_suffix(".svg"))
    raw = {"measured": [asdict(one) for one in measured], "peers": [asdict(peer) for peer in peers]}
    table_path(f"speed-{name}").with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
