"""Before Python 3.11 the TimeoutErrors of asyncio and concurrent.futures are none of Python's own."""

import ast
from collections.abc import Iterator

from tests.architecture.test_layers import ROOT

SERVICES = ("control", "kv", "weights", "integrations")  # which wait for nothing else: no sockets of their own


def caught(tree: ast.AST) -> Iterator[ast.Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            yield from (name for name in ast.walk(node.type) if isinstance(name, ast.Name))


def test_services_catch_the_timeouts_that_are_raised_in_every_python() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{name.lineno}"
        for service in SERVICES
        for path in sorted((ROOT / "src/crossrail" / service).rglob("*.py"))
        for name in caught(ast.parse(path.read_text()))
        if name.id == "TimeoutError"
    ]
    assert not found, "catch asyncio.TimeoutError, or that of concurrent.futures"
