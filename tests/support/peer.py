"""A Node in a process of its own: `python -m tests.support.peer`.

Messages of tests.support.messages: {"command": ..., "arguments": {...}} in, {"result": ...} or {"error": [class, text]}
out. Standard output is reserved for them: anything printed goes to standard error. Ends at the end of standard input.
"""

import faulthandler
import os
import sys
import traceback

from tests.support.fork_server import die_with_parent
from tests.support.messages import HEADER_BYTES, decoded, encoded, length_of
from tests.support.node import Node


def serve(node: Node) -> None:
    faulthandler.enable()
    die_with_parent()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while header := sys.stdin.buffer.read(HEADER_BYTES):
        request = decoded(sys.stdin.buffer.read(length_of(header)))
        answers.write(encoded(answer(node, request)))
        answers.flush()
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
