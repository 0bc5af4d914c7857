"""What Prometheus would see: a scrape over HTTP, parsed as Prometheus parses it."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Scrape:
    metrics: tuple[Metric, ...]

    @property
    def names(self) -> set[str]:
        """Of samples: a histogram's with its suffixes."""
        return {sample.name for metric in self.metrics for sample in metric.samples}

    def __call__(self, name: str, /, **labels: str) -> float:
        """The sum of the samples of this name whose labels are these, whatever others they have. KeyError when there is none."""
        values = [
            sample.value
            for metric in self.metrics
            for sample in metric.samples
            if sample.name == f"tokenmill_{name}" and labels.items() <= sample.labels.items()
        ]
        if not values:
            raise KeyError(f"{name} {labels}")
        return sum(values)


async def scrape(address: str) -> Scrape:
    """Of HOST:PORT. Raises urllib's HTTPError."""
    return await asyncio.to_thread(scrape_now, address)


def scrape_now(address: str) -> Scrape:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
        return Scrape(tuple(text_string_to_metric_families(response.read().decode())))
