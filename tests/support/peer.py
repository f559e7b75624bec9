"""A Node in a process of its own: `python -m tests.support.peer`.

One JSON object per line: {"command": ..., "arguments": {...}} in, {"result": ...} or {"error": [class, text]} out.
Standard output is kept for that: what anyone prints goes to standard error. Ends when standard input does.
"""

import faulthandler
import json
import os
import sys
import traceback

from tests.support.fork_server import die_with_parent
from tests.support.node import Node


def serve(node: Node) -> None:
    faulthandler.enable()
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(answer(node, request)) + "\n")
    node.close_all()
    answers.close()


def answer(node: Node, request: dict[str, object]) -> dict[str, object]:
    try:
        return {"result": node.execute(request["command"], request["arguments"])}
    except Exception as error:  # every failure belongs to the test that asked
        traceback.print_exc()
        return {"error": [type(error).__name__, str(error)]}


def main() -> None:
    serve(Node())


if __name__ == "__main__":
    main()
