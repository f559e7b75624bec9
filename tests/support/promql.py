"""Which metrics and labels the queries of our dashboard and alert rules refer to, and whether they exist.

Not a full PromQL parser: enough for the existing queries, and an error for anything else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from crossrail.observe.files import ALERTS, DASHBOARD
from tests.support.metrics import Samples

# Peer states, as returned by Engine.peer_state; not all can occur at the same time.
PEER_STATES = {"unknown", "connecting", "connected", "slow", "frozen"}

_FUNCTIONS = {"rate", "increase", "deriv", "histogram_quantile", "sum", "max", "topk"}
_KEYWORDS = {"and", "or", "on", "group_left"}
_TOKEN = re.compile(
    r"""\s+ | (?P<range>\[[^\]]*\]) | (?P<matchers>\{[^}]*\}) | (?P<word>[a-zA-Z_]\w*)
      | (?P<number>\d+(\.\d+)?) | (?P<sign>[()+*/,-] | [<>=!]=? | ==)""",
    re.VERBOSE,
)
_MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')


@dataclass
class Query:
    """where: in which file, and there. legend: Grafana's template of a series' name; of an alert, its texts."""

    where: str
    expr: str
    legend: str


@dataclass
class Selector:
    """labels: that its samples must have, also those it is aggregated by. equal: which must have these values."""

    name: str
    labels: set[str]
    equal: dict[str, str]


def queries() -> list[Query]:
    """All queries of the dashboard and the alert rules."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [
        Query(f"dashboard: {panel['title']}", target["expr"], target["legendFormat"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    return found + [Query(f"alert: {rule['alert']}", rule["expr"], rule["texts"]) for rule in alerts()]


def alerts() -> list[dict[str, Any]]:
    """Name, expression and texts of each rule; our file is simple enough to be read without a YAML library."""
    rules = []
    for text in re.split(r"^ {6}- ", ALERTS.read_text(), flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"^ *(\w+): (.*(?:\n {10}.*)*)$", text, re.MULTILINE))
        expr = re.sub(r"^>-", "", fields["expr"])
        rules.append({"alert": fields["alert"], "expr": " ".join(expr.split()), "texts": text})
    return rules


def selectors(query: Query) -> Iterator[Selector]:
    """Each metric that is asked for."""
    yield from _selectors(_tokens(query), query, set())


def _tokens(query: Query) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(query.expr):
        match = _TOKEN.match(query.expr, at)
        assert match, f"{query.where}: cannot read {query.expr[at:]!r}"
        if match.lastgroup:
            tokens.append((match.lastgroup, match.group()))
        at = match.end()
    return tokens


def _selectors(tokens: list[tuple[str, str]], query: Query, by: set[str]) -> Iterator[Selector]:
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        at += 1
        if kind != "word" or text in _KEYWORDS or text in _FUNCTIONS:
            if kind == "word" and text in {"on", "group_left"}:  # on (labels), group_left (labels)
                at = _closing(tokens, at) + 1
            continue
        if text == "by":
            end = _closing(tokens, at)
            labels = {word for what, word in tokens[at:end] if what == "word"}
            begin, end = end + 1, _closing(tokens, end + 1)
            yield from _selectors(tokens[begin + 1 : end], query, by | labels)
            at = end + 1
            continue
        assert text.startswith("crossrail_"), (
            f"{query.where}: {text!r} is neither a metric of ours nor a known function"
        )
        matchers = tokens[at][1] if at < len(tokens) and tokens[at][0] == "matchers" else "{}"
        found = _MATCHER.findall(matchers)
        assert len(found) == matchers.count("="), f"{query.where}: cannot read {matchers}"
        yield Selector(
            text, by | {label for label, _, _ in found}, {key: value for key, op, value in found if op == "="}
        )


def _closing(tokens: list[tuple[str, str]], opening: int) -> int:
    assert tokens[opening][1] == "("
    depth = 0
    for at in range(opening, len(tokens)):
        depth += {"(": 1, ")": -1}.get(tokens[at][1], 0)
        if depth == 0:
            return at
    raise AssertionError(f"a parenthesis is not closed: {tokens}")


def unanswered(query: Query, samples: Samples) -> list[str]:
    """The parts of a query that match none of the samples, in words; empty if all match."""
    wrong = []
    shown: set[str] = set()
    for selector in selectors(query):
        there = [dict(labels) for (name, labels) in samples if name == selector.name]
        has = set.intersection(*(set(labels) for labels in there)) if there else set()
        if not there:
            wrong.append(f"there is no {selector.name}")
        elif not selector.labels <= has:
            wrong.append(f"{selector.name} has no {sorted(selector.labels - has)}")
        for label, value in selector.equal.items():
            known = {labels.get(label) for labels in there} | (PEER_STATES if label == "state" else set())
            if label in has and value not in known:
                wrong.append(f"{selector.name} has no {label}={value!r}")
        shown |= (selector.labels or has) if " by " in query.expr else has
    wanted = set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", query.legend))
    if not wanted <= shown:
        wrong.append(f"its texts name {sorted(wanted - shown)}, and its series have {sorted(shown)}")
    return [f"{query.where}: {what}" for what in wrong]


def assert_answered(samples: Samples, prefix: str) -> None:
    """All queries about metrics with this prefix are answered by these samples; and there are such queries."""
    asked = [query for query in queries() if any(re.match(prefix, each.name) for each in selectors(query))]
    assert asked
    assert [wrong for query in asked for wrong in unanswered(query, samples)] == []
