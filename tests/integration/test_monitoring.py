"""The alert rules and the dashboard under deploy/: every expression parses, and names metrics and labels that real scrapes have."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.fakes.processes import METRICS, Processes, wait_serving
from tests.fakes.scrapes import scrape_now

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/tokenmill.json"
ALERTS = DEPLOY / "prometheus/alerts.yml"
# What Grafana and Prometheus put in, and the metrics and labels that Prometheus itself gives.
VARIABLES = {"$__rate_interval": "5m", "$lane": ".*"}
OF_PROMETHEUS = {"up": {"job", "instance"}}


def dashboard_expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for variable, value in VARIABLES.items():
        expressions = [expression.replace(variable, value) for expression in expressions]
    return expressions


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


EXPRESSIONS = dashboard_expressions() + [rule["expr"] for rule in rules()]


class Names(dict[str, set[str]]):
    """Metrics, each with the labels that are asked of it; `grouped` are labels that sums keep."""

    def __init__(self, expression: promql_parser.Expr) -> None:
        super().__init__()
        self.grouped: set[str] = set()
        promql_parser.walk(expression, self._visit)

    def _visit(self, node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            self.setdefault(str(node.name), set()).update(matcher.name for matcher in node.matchers.matchers)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            self.grouped |= set(node.modifier.labels)


@pytest.fixture(scope="module")
def scraped() -> dict[str, set[str]]:
    """The labels of each metric of an idle service: no figure waits for something to happen."""
    with Processes() as processes:
        executor = processes.executor(*METRICS)
        scheduler = processes.scheduler(executor.address, flags=METRICS)
        asyncio.run(wait_serving(scheduler.address))
        labels: dict[str, set[str]] = dict(OF_PROMETHEUS)
        for service in (scheduler, executor):
            for metric in scrape_now(service.metrics_address).metrics:
                for sample in metric.samples:
                    labels.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    return labels


def test_expressions_are_found() -> None:
    assert len(dashboard_expressions()) > 40
    assert len(rules()) > 10


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_what_there_is(expression: str, scraped: dict[str, set[str]]) -> None:
    names = Names(promql_parser.parse(expression))
    assert names
    for name, labels in names.items():
        assert name in scraped, f"no metric {name}"
        assert labels | names.grouped <= scraped[name] | {"le"}, f"{name} has {scraped[name]}"


def test_each_rule_says_what_happened_and_how_bad_it_is() -> None:
    for rule in rules():
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))


def test_every_metric_is_on_the_dashboard_or_has_its_reason_not_to_be(scraped: dict[str, set[str]]) -> None:
    """What nobody looks at would rot. The others are said by a shown one, or are to be joined with one."""
    shown = {name for expression in EXPRESSIONS for name in Names(promql_parser.parse(expression))}
    series = {name.removesuffix(suffix) for name in shown for suffix in ("_bucket", "_sum", "_count")} | shown
    told = {name for name in scraped if name.startswith("tokenmill_") and not name.endswith(("_bucket", "_sum", "_count", "_info"))}
    unshown = {
        "tokenmill_busy_seconds_total", "tokenmill_idle_share", "tokenmill_plans_out", "tokenmill_max_num_seqs",
        "tokenmill_executor_draining", "tokenmill_steps_total", "tokenmill_requests_accepted_total",
        "tokenmill_overload_changes_total",
        "tokenmill_executor_steps_total", "tokenmill_executor_wait_seconds_total", "tokenmill_executor_computed_tokens_total",
        "tokenmill_executor_cached_tokens_total", "tokenmill_executor_sampled_tokens_total", "tokenmill_executor_blocks",
        "tokenmill_executor_plans_queued", "tokenmill_executor_plans_total", "tokenmill_executor_kv_offload_blocks",
    }  # fmt: skip
    assert told - series == unshown
