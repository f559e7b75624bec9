"""The tree shows the architecture, and this keeps it true: imports and #includes point down, never up.

    kv | weights | moe -> engine -> _core -> native/engine -> transport.h <- shm | tcp | rdma | null
    transport/rdma/nic.h <- rdma | ofi | verbs | sim

To allow a new arrow, add it to NATIVE_MAY_USE or PYTHON_MAY_USE below, or to parts.py, where a reviewer sees it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

from tests.architecture.parts import PARTS_MAY_USE

ROOT = Path(__file__).resolve().parents[2]

# --- C++ ---

# A layer is a folder of native/; "backend" is any folder of native/transport/, and "factory" is
# transport/open.h, the one way from an engine to a backend. "nic" is transport/rdma/nic.h, which is all that the rdma
# backend and its NICs, verbs, ofi and sim, know of each other. Every layer may use itself; a backend, its own folder.
NATIVE_MAY_USE: dict[str, set[str]] = {
    "util": set(),
    "device": {"util"},
    "transport": {"util", "device"},
    "nic": {"util", "device", "transport"},
    "backend": {"util", "device", "transport", "nic"},
    "factory": {"util", "device", "transport", "nic", "backend"},
    "engine": {"util", "device", "transport", "factory"},
    "kv": {"util"},
    "weights": {"util"},
    "moe": {"util", "device", "transport", "factory", "engine"},
    "bench": {"util", "device", "transport", "factory", "nic", "backend", "engine", "moe"},
    "bindings": {"util", "device", "transport", "factory", "nic", "backend", "engine", "kv", "moe", "weights", "bench"},
}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
PYTHON_HEADER = re.compile(r"^(nanobind/|pybind11/|Python\.h$|numpy/|structmember\.h$)")


def native_layer(path: str) -> str:
    """The layer of a file, named relative to native/."""
    parts = PurePosixPath(path).parts
    if path == "transport/rdma/nic.h":
        return "nic"
    if parts[0] == "transport" and len(parts) > 2:
        return "backend"
    if parts[0] == "transport" and PurePosixPath(path).stem == "open":
        return "factory"
    return parts[0]


def native_violations(sources: Mapping[str, str]) -> list[str]:
    """What breaks the layering in sources: text by path relative to native/."""
    found = []
    for path, text in sources.items():
        layer = native_layer(path)
        if layer not in NATIVE_MAY_USE:
            found.append(f"{path}: no layer is called '{layer}'")
            continue
        for bracket, name in INCLUDE.findall(text):
            if PYTHON_HEADER.match(name) and layer != "bindings":
                found.append(f"{path} includes {name}: no Python type below bindings/")
            if bracket == "<":
                continue
            target = resolve_include(path, name, sources)
            if target is None:
                found.append(f"{path} includes {name}, which is not in native/")
                continue
            target_layer = native_layer(target)
            if layer == target_layer == "backend":
                allowed = PurePosixPath(path).parts[1] == PurePosixPath(target).parts[1]
            else:
                allowed = target_layer == layer or target_layer in NATIVE_MAY_USE[layer]
            if not allowed:
                found.append(f"{path} includes {target}: {layer} must not use {target_layer}")
    return found


def resolve_include(path: str, name: str, sources: Mapping[str, str]) -> str | None:
    beside = normalised(PurePosixPath(path).parent / name)
    return next((candidate for candidate in (beside, normalised(PurePosixPath(name))) if candidate in sources), None)


def normalised(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


# --- Python ---

# A layer is the first component below crossrail: a package named here, "errors" for the modules of ERRORS, or "engine"
# for all other modules at the top. _core is the native module. All may use errors. Nobody but __main__ imports the
# command line.
ERRORS = ("errors", "_text")
PYTHON_MAY_USE: dict[str, set[str]] = {
    "_core": set(),
    "errors": set(),
    "topology": set(),
    "engine": {"_core", "topology"},
    "campaign": {"engine"},
    "sim": {"engine", "observe", "campaign", "_core"},
    "testing": {"engine", "sim"},
    "observe": {"engine"},
    "control": {"engine"},
    "kv": {"engine", "observe", "control", "_core"},
    "weights": {"engine", "observe", "control", "_core"},
    "moe": {"engine", "observe", "_core"},
    "integrations": {"engine", "observe", "control", "kv", "weights", "moe"},
    "doctor": {"engine", "_core", "topology"},
    "cli": {
        "engine",
        "_core",
        "sim",
        "observe",
        "control",
        "kv",
        "weights",
        "moe",
        "integrations",
        "doctor",
        "topology",
    },
    "__main__": {"cli"},
}
# A module below a layer, or, with the dot, what an f-string goes on from. "crossrail.kv" alone is a logger's name.
NAMED = re.compile(r"crossrail(\.\w+){2,}|crossrail(\.\w+)+\.")


def python_layer(module: str) -> str:
    """The layer of a module's full name."""
    if module == "crossrail.doctor.__main__":  # `python -m crossrail.doctor` is `crossrail doctor`
        return "__main__"
    name = module.partition(".")[2].partition(".")[0]
    if name in ERRORS:
        return "errors"
    return name if name in PYTHON_MAY_USE else "engine"


def python_violations(sources: Mapping[str, str]) -> list[str]:
    """What breaks the layering in sources: text by path relative to src/, as in crossrail/kv/base.py."""
    modules = {module_name(path): path for path in sources}
    found = []
    for module, path in modules.items():
        layer = python_layer(module)
        for target in sorted(set(imported_modules(module, path, sources[path], modules))):
            target_layer = python_layer(target)
            if target_layer != layer:
                if target_layer not in {"errors", *PYTHON_MAY_USE[layer]}:
                    found.append(f"{path} imports {target}: {layer} must not use {target_layer}")
            elif layer in PARTS_MAY_USE and (part := python_part(module)):
                target_part = python_part(target)
                if target_part != part and target_part not in PARTS_MAY_USE[layer].get(part, set()):
                    found.append(f"{path} imports {target}: {part} must not use {target_part or 'all of ' + layer}")
    return found


def python_part(module: str) -> str:
    """What of its layer a module is in: a package or module right below it, "" for the layer's __init__."""
    depth = 1 if python_layer(module) == "engine" else 2
    parts = module.split(".")
    return parts[depth] if len(parts) > depth else ""


def module_name(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(module: str, path: str, text: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Full names of crossrail's modules that this one imports, at the top or inside functions, or names in a string of
    its own, as for import_module(). The package's own names (from crossrail import Engine) are the engine layer's, and
    so is the package."""
    package = module if PurePosixPath(path).stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            # `from a import b` may name a module a.b or a thing in a; _core has no source here.
            names = [
                full if (full := f"{base}.{alias.name}") in modules or full == "crossrail._core" else base
                for alias in node.names
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            names = [name for name in [node.value.rstrip(".")] if name in modules]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "crossrail")


# --- the tree ---


def read_tree(top: Path, *suffixes: str) -> dict[str, str]:
    files = [f for f in sorted(top.rglob("*")) if f.suffix in suffixes and f.is_file()]
    return {f.relative_to(top).as_posix(): f.read_text(encoding="utf-8") for f in files}


def test_native_includes_point_down() -> None:
    sources = read_tree(ROOT / "native", ".h", ".cc")
    assert {native_layer(path) for path in sources} >= {"util", "transport", "backend", "engine", "bindings"}
    assert native_violations(sources) == []


def test_python_imports_point_down() -> None:
    sources = read_tree(ROOT / "src", ".py")
    assert "crossrail/__init__.py" in sources
    assert python_violations(sources) == []


# --- canaries: the checker must see what it is there to see ---

SOUND_NATIVE = {
    "util/futex.h": "#include <atomic>",
    "transport/transport.h": '#include "transport/types.h"\n#include "util/futex.h"',
    "transport/types.h": "",
    "transport/open.h": '#include "transport/transport.h"',
    "transport/open.cc": '#include "transport/open.h"\n#include "transport/shm/device.h"',
    "transport/shm/device.h": '#include "transport/transport.h"\n#include "ring.h"',
    "transport/shm/ring.h": '#include "../types.h"',
    "transport/tcp/device.h": '#include "transport/transport.h"',
    "engine/engine.h": '#include "transport/open.h"\n#include "util/futex.h"',
    "bindings/module.cc": '#include <nanobind/nanobind.h>\n#include "engine/engine.h"',
}


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("util/x.h", '#include "engine/engine.h"', "util must not use engine"),
        ("transport/transport.h", '#include "transport/shm/ring.h"', "transport must not use backend"),
        ("transport/transport.h", '#  include "transport/open.h"', "transport must not use factory"),
        ("transport/shm/ring.h", '#include "engine/engine.h"', "backend must not use engine"),
        ("transport/shm/ring.h", '#include "../tcp/device.h"', "backend must not use backend"),
        ("transport/shm/ring.h", '#include "transport/open.h"', "backend must not use factory"),
        ("engine/x.cc", '#include "transport/shm/device.h"', "engine must not use backend"),
        ("engine/x.cc", "#include <nanobind/nanobind.h>", "no Python type below bindings/"),
        ("engine/x.cc", "\t#include <Python.h>", "no Python type below bindings/"),
        ("engine/x.cc", '#include "engine/gone.h"', "not in native/"),
        ("plugins/x.cc", "", "no layer is called 'plugins'"),
    ],
)
def test_upward_include_rejected(path: str, line: str, complaint: str) -> None:
    assert native_violations(SOUND_NATIVE) == []
    (violation,) = native_violations({**SOUND_NATIVE, path: line})
    assert complaint in violation


SOUND_PYTHON = {
    "crossrail/__init__.py": "from crossrail.engine import Engine\nfrom ._core import version",
    "crossrail/__main__.py": "from crossrail.cli import main",
    "crossrail/_text.py": "",
    "crossrail/errors.py": "from crossrail._text import plain",
    "crossrail/topology/__init__.py": "from crossrail.errors import UsageError",
    "crossrail/engine.py": "from . import _core\nimport numpy\n\ndef f():\n    from crossrail import topology",
    "crossrail/kv/__init__.py": "from .base import Layout",
    "crossrail/kv/base.py": "from crossrail import Engine\nfrom ..engine import Engine",
    "crossrail/weights/__init__.py": "import crossrail.engine\nfrom crossrail.weights.planning.plan import Plan",
    "crossrail/weights/errors.py": "",
    "crossrail/weights/planning/plan.py": "from crossrail.weights.inventory import holdings",
    "crossrail/weights/planning/__init__.py": "",
    "crossrail/weights/inventory/holdings.py": "",
    "crossrail/cli/__init__.py": "from crossrail import kv",
}


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("crossrail/engine.py", "from crossrail.kv import Layout", "engine must not use kv"),
        ("crossrail/engine.py", "from . import kv", "engine must not use kv"),
        ("crossrail/__init__.py", "from .cli import main", "engine must not use cli"),
        ("crossrail/topology/__init__.py", "from crossrail.engine import Engine", "topology must not use engine"),
        ("crossrail/_text.py", "from crossrail.topology import Topology", "errors must not use topology"),
        (
            "crossrail/weights/plan.py",
            "def f():\n    from crossrail.kv.base import Layout",
            "weights must not use kv",
        ),
        ("crossrail/weights/plan.py", "from ..kv import Layout", "weights must not use kv"),
        (
            "crossrail/weights/inventory/holdings.py",
            "from crossrail.weights.planning import plan",
            "inventory must not use planning",
        ),
        ("crossrail/weights/errors.py", "from .planning.plan import Plan", "errors must not use planning"),
        ("crossrail/weights/planning/plan.py", "from crossrail.weights import Plan", "planning must not use all of"),
        ("crossrail/weights/new.py", "from crossrail.weights import errors", "new must not use errors"),
        ("crossrail/kv/transfer/plan.py", "from ..services.node import Node", "transfer must not use services"),
        ("crossrail/control/base.py", "from crossrail import _core", "control must not use _core"),
        ("crossrail/control/base.py", "import crossrail._core", "control must not use _core"),
        ("crossrail/kv/base.py", 'import_module("crossrail.weights.errors")', "kv must not use weights"),
        ("crossrail/kv/base.py", 'import_module(f"crossrail.weights.planning.{x}")', "kv must not use weights"),
        ("crossrail/_files.py", "from crossrail.engine import Engine", "_files must not use engine"),
        ("crossrail/topology/new.py", "from crossrail.topology import Topology", "new must not use all of topology"),
    ],
)
def test_upward_import_rejected(path: str, line: str, complaint: str) -> None:
    assert python_violations(SOUND_PYTHON) == []
    (violation,) = python_violations({**SOUND_PYTHON, path: line})
    assert complaint in violation
