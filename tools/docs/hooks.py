"""What mkdocs does besides reading docs/: pages from elsewhere in the repository, the reference, and the command line.

The reference lists modules; their contents come from docstrings, by mkdocstrings. The command line pages show each
command's `--help`. Links between files are written for readers of the repository, and rewritten here.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

from crossrail.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
# Pages that lie elsewhere, by their place in the repository, and where the site has them.
ELSEWHERE = {
    "ARCHITECTURE.md": "repository/architecture.md",
    "CHANGELOG.md": "repository/changelog.md",
    "CONTRIBUTING.md": "repository/contributing.md",
    "README.md": "repository/readme.md",
    "benchmarks/README.md": "repository/benchmarks.md",
    "examples/README.md": "examples/index.md",
    "src/crossrail/errors.md": "errors.md",
}
# Programs, each with a page of its own.
PROGRAMS = {
    program: f"{program}.md"
    for program in sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "examples").rglob("*.py"))
}
MODULES = {
    "crossrail": "What `import crossrail as xr` gives.",
    "crossrail.kv": "KV-cache transfer as a library; [how to use it](../kv-library.md).",
    "crossrail.kv.model": "What a model of your own has to offer; [how to write one](../kv-engine.md).",
    "crossrail.weights": "Weight updates; [how to use them](../weights.md).",
    "crossrail.weights.inventory.mapping": "Names of a framework's tensors; [how to use them](../weights-plans.md).",
    "crossrail.moe": "Dispatch and combine; [how to use them](../moe.md).",
    "crossrail.moe.graph": "The same in CUDA graphs; [how to use them](../moe-gpu.md#in-cuda-graphs).",
    "crossrail.observe": "Metrics; [how to use them](../metrics.md).",
    "crossrail.observe.files": "A dashboard and alerts; [how to use them](../metrics.md).",
    "crossrail.sim": "The simulator; [how to use it](../simulator.md).",
    "crossrail.topology": "GPUs, NICs and NUMA nodes; [how to use it](../topology.md).",
    "crossrail.testing": "A plugin of pytest; [how to use it](../simulator.md).",
    "crossrail.integrations.checkpoint_engine": "[How to use it](../weights-checkpoint-engine.md).",
    "crossrail.integrations.deepep": "[How to use it](../moe.md#with-programs-written-for-deepep).",
    "crossrail.integrations.sglang": "[How to use it](../kv-sglang.md).",
    "crossrail.integrations.transformers": "[How to use it](../moe.md#with-transformers).",
    "crossrail.integrations.verl": "[How to use it](../weights-verl.md).",
    "crossrail.integrations.vllm": "[How to use it](../kv-vllm.md).",
}
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")
HELP_WIDTH = 100


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in docs/."""
    for source, target in ELSEWHERE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for source, target in PROGRAMS.items():
        text = f"# {source}\n\n```python\n{(ROOT / source).read_text()}```\n"
        files.append(File.generated(config, target, content=text))
    for module, about in MODULES.items():
        text = f"# {module}\n\n{about}\n\n::: {module}\n"
        files.append(File.generated(config, f"reference/{module}.md", content=text))
    files.append(File.generated(config, "reference/command-line.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links that are right in the repository into links of the site."""
    here = page.file.src_uri
    places = {site: source for source, site in ELSEWHERE.items()}
    if here.startswith("reference/") or here in PROGRAMS.values():
        return markdown
    source = places.get(here, f"docs/{here}")

    def turned(found: re.Match[str]) -> str:
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        inside = wanted.removeprefix("docs/") if wanted.startswith("docs/") else None
        target = ELSEWHERE.get(wanted, PROGRAMS.get(wanted, inside))
        if target is None:
            return found[0]
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{found[2] or ''})"

    return LINK.sub(turned, markdown)


def command_line() -> str:
    """One section per command, with the output of its --help."""
    parts = ["# Command line\n\nThe `--help` of each command. `python -m crossrail` is the same as `crossrail`."]
    for path, text in commands(main, "crossrail", None):
        parts.append(f"## {path}\n\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def commands(command: click.Command, path: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    """Name and help of a command and all below it, except hidden ones."""
    name = path.rpartition(" ")[2]
    context = click.Context(
        command, info_name=name, parent=parent, max_content_width=HELP_WIDTH, terminal_width=HELP_WIDTH
    )
    yield path, command.get_help(context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            if found is not None and not found.hidden:
                yield from commands(found, f"{path} {below}", context)
