"""What the GPU benchmark has found so far, written after each part, and what becomes of a part that fails or does not end.

A failure that the device does not survive would be that of all later parts, and a kernel that hangs would be the end: then a new
process takes over, with this report, behind the part that did it. Must not know: torch, what the parts do.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.table import Table


@dataclass(slots=True)
class Report:
    """`deadline_s` is of `time.monotonic()`, which is the machine's: no part begins later. `limit_s` is for one part.

    `begun` names the parts that need not be tried again. `take_over` replaces this process.
    """

    path: Path
    title: str
    deadline_s: float
    limit_s: float
    is_lost: Callable[[], bool]
    take_over: Callable[[], NoReturn]
    tables: list[Table] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    failed: bool = False

    def resume(self) -> None:
        """With what the process before has found."""
        content = json.loads(self.path.with_suffix(".json").read_text(encoding="utf-8"))
        self.title, self.left_out, self.begun, self.failed = (content[name] for name in ("title", "left_out", "begun", "failed"))
        self.tables = [Table(**table) for table in content["tables"]]

    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def part(self, name: str, run: Callable[[], Table], required: bool = True) -> None:
        """Runs a part and keeps its table; says so when there is none, which is a failure if it is required."""
        if name in self.begun:
            return
        self.begun.append(name)
        started_s, lost = time.monotonic(), False
        if self.left_s() <= 0:
            self._leave_out(name, "no time was left", required)
        else:
            watch = threading.Timer(self.limit_s, self._abandon, (name, required))
            watch.daemon = True
            watch.start()
            try:
                self._keep(run())
            except Exception as error:
                traceback.print_exc()
                self._leave_out(name, f"{type(error).__name__}: {str(error)[:500]}", required)
                lost = self.is_lost()
            watch.cancel()
        print(f"({name}: {time.monotonic() - started_s:.1f} s, {self.left_s():.0f} s left)\n", flush=True)
        self.write()
        if lost:
            print("The device is lost: a new process goes on.\n", flush=True)
            self.take_over()

    def _keep(self, table: Table) -> None:
        self.tables.append(table)
        print(table.markdown(), flush=True)

    def _leave_out(self, name: str, reason: str, required: bool) -> None:
        self.left_out.append(f"{name}: {reason}")
        self.failed |= required

    def _abandon(self, name: str, required: bool) -> None:
        """On a thread of its own, while the part is stuck."""
        self._leave_out(name, f"had not ended after {self.limit_s:.0f} s", required)
        self.write()
        print(f"({self.left_out[-1]}: a new process goes on)\n", flush=True)
        self.take_over()

    def write(self) -> None:
        parts = [f"# {self.title}", "", *(table.markdown() for table in self.tables)]
        if self.left_out:
            parts += ["## Not run", "", *(f"- {line}" for line in self.left_out), ""]
        self.path.with_suffix(".md").write_text("\n".join(parts), encoding="utf-8")
        content = {
            "title": self.title,
            "tables": [asdict(table) for table in self.tables],
            "left_out": self.left_out,
            "begun": self.begun,
            "failed": self.failed,
        }
        self.path.with_suffix(".json").write_text(json.dumps(content, indent=1), encoding="utf-8")
