"""A Node in a process of its own: `python -m tests.support.peer`.

One JSON object per line: {"command": ..., "arguments": {...}} in, {"result": ...} or {"error": [class, text]} out.
Standard output is kept for that: what anyone prints goes to standard error. Ends when standard input does.
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback

from tests.support.node import Node

PR_SET_PDEATHSIG = 1


def serve(node: Node) -> None:
    faulthandler.enable()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # never outlive the tests
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


if __name__ == "__main__":
    serve(Node())
