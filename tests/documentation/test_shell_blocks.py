"""Commands of README.md and docs/ that belong together run as they stand there, each block on a host of its own.

That is three namespaces: ports are free whatever runs here, host names are those of the page, and what a block started
ends with it. Other blocks are commands that tests/cli and others run with less to do (demos, benchmarks, plans), or
install something; test_commands.py checks the words of all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.documentation.blocks import blocks
from tests.multihost.test_commands import PLAIN
from tests.support.hosts import why_not
from tests.support.limits import WAIT_S
from tests.support.process import REPOSITORY
from tests.weights.safetensors_file import write

_HOST = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-euc"]
_SET_UP = """
ip link set lo up
printf '127.0.0.1 localhost router\\n' >hosts && mount --bind hosts /etc/hosts
mount -t tmpfs none /run
"""


def block(page: str, marker: str) -> list[str]:
    """The lines of the one that has this in it."""
    (found,) = (text for text in blocks("bash")[page] if marker in text)
    return found.splitlines()


def beside(line: str, until: str) -> str:
    """Runs a line in the background; goes on once the condition holds, and fails if the line has ended by then."""
    return f"{{ {line}\n}} &\nuntil {until}; do kill -0 $!; sleep 0.05; done"


def on_a_host(folder: Path, *lines: str) -> str:
    """What the lines print, in that folder."""
    if reason := why_not():
        pytest.skip(reason)
    environment = {
        **PLAIN,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
        "XDG_RUNTIME_DIR": str(folder),
    }
    script = "\n".join([_SET_UP, *lines])
    done = subprocess.run(
        [*_HOST, script], cwd=folder, env=environment, capture_output=True, text=True, timeout=4 * WAIT_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_file_pushed_to_an_inbox(tmp_path: Path) -> None:
    serve, push = block("README.md", "crossrail push")
    file = tmp_path / "model.safetensors"
    file.write_bytes(np.arange(300_000, dtype=np.uint32).tobytes())

    on_a_host(tmp_path, beside(serve, "[ -e crossrail/inbox.serve ]"), push)

    assert (tmp_path / "inbox" / file.name).read_bytes() == file.read_bytes()


def test_cluster_of_kv(tmp_path: Path) -> None:
    secret, router, prefiller, decoder, ask, top = block("docs/kv.md", "crossrail kv top")
    answers = "curl -s -o /dev/null http://router:8000/health"
    ready = "curl -sf -o /dev/null http://router:8000/health"

    services = [beside(router, answers), beside(prefiller, "true"), beside(decoder, ready)]
    printed = on_a_host(tmp_path, secret, *services, ask, top)

    assert "data: [DONE]" in printed
    assert "prefiller" in printed and "decoder" in printed


def test_checkpoint_loaded_into_eight_ranks(tmp_path: Path) -> None:
    (load,) = block("docs/weights.md", "crossrail weights load")
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / "all.safetensors", {"w": np.arange(64, dtype=np.uint16)})

    printed = on_a_host(
        tmp_path,
        "export CROSSRAIL_SECRET=shared",
        beside(load, "[ -e /run/model.controller ]"),
        "load=$!; python -m tests.documentation.eight_ranks /run/model.controller & wait $load",
    )

    assert "at 8 inference ranks" in printed
