"""./dev docs and wheel: what others read and install."""

from __future__ import annotations

from tools.dev.arguments import no_arguments
from tools.dev.build import locked, prepare, set_up
from tools.dev.processes import PYTHON, ROOT, environment, must, replace_process, say, tool
from tools.dev.venv import ensure_extra
from tools.wheel import options


def docs(arguments: list[str]) -> int:
    no_arguments("docs", arguments)
    prepare()  # the references are read from what is built
    with locked():
        ensure_extra("docs")
    env = environment(NO_MKDOCS_2_WARNING="1")  # it is about another program's future
    must([tool("mkdocs"), "build", "--strict", "--quiet"], timeout_s=600, env=env)
    say("the site is in build/site: open build/site/index.html")
    return 0


def wheel(arguments: list[str]) -> int:
    options.parse(arguments)  # help and mistakes, before anything is installed
    with locked():
        set_up(native_tests=True)  # libibverbs' headers among it
        ensure_extra("wheel")
    return replace_process([PYTHON, str(ROOT / "tools" / "wheel" / "run.py"), *arguments])
