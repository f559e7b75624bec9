"""A Prometheus, where there is one, scrapes an engine, carries out every query of the dashboard and loads the rules."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossrail.observe import serve_metrics
from crossrail.observe.files import ALERTS
from tests.conftest import EngineFactory
from tests.observe.test_dashboard import ENGINE_METRICS
from tests.observe.test_metrics import write
from tests.support.limits import PROGRAM_S, WAIT_S, eventually
from tests.support.ports import free_port
from tests.support.promql import queries, selectors

pytestmark = pytest.mark.no_sanitizer  # starts another program

CONFIG = """
global: {{scrape_interval: 500ms, evaluation_interval: 200ms}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: crossrail
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


class Prometheus:
    def __init__(self, folder: Path, target_port: int) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(rules=ALERTS, port=target_port))
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._url[7:]}",
            ],
            stderr=self._log,
        )

    def ask(self, what: str, **arguments: str) -> Any:
        """None: it does not answer yet."""
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}") as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:  # not ready
                    return None
                raise AssertionError(f"{arguments}: {error.read().decode()}") from None
        except OSError:
            return None

    def query(self, expr: str) -> list[Any]:
        return (self.ask("query", query=expr) or {"result": []})["result"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._log.close()


@pytest.fixture
def prometheus(open_engine: EngineFactory, tmp_path: Path) -> Iterator[Prometheus]:
    here, there = open_engine("here"), open_engine("there")
    with serve_metrics(here, there, port=0) as server:
        server_side = Prometheus(tmp_path, server.port)
        try:
            for _ in range(300):  # of what is over at once one in 256 is timed
                write(here, there)
            eventually(lambda: server_side.query("count_over_time(crossrail_engine_open[1m]) > 1"), "two scrapes")
            yield server_side
        finally:
            server_side.close()


def test_every_query_is_carried_out(prometheus: Prometheus) -> None:
    for query in queries():
        expr = query.expr.replace("$engine", ".*").replace("$__rate_interval", "1m")
        is_about_engines = all(re.match(ENGINE_METRICS, each.name) for each in selectors(query))
        if is_about_engines and " > 0" not in expr and not query.where.startswith("alert"):
            # From a scrape that takes too long until the next one there is no data.
            eventually(lambda expr=expr: prometheus.query(expr), f"data for {query}")
        else:
            eventually(lambda expr=expr: prometheus.ask("query", query=expr) is not None, f"an answer to {query}")


def test_rules_are_loaded_and_evaluated(prometheus: Prometheus) -> None:
    def health() -> set[str]:
        groups = (prometheus.ask("rules") or {"groups": []})["groups"]
        return {rule["health"] for group in groups for rule in group["rules"]}

    eventually(lambda: health() == {"ok"}, "all rules evaluated")
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True, timeout=PROGRAM_S)
