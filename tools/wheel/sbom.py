"""What a published wheel was made of, as CycloneDX 1.6 (PEP 770 has it in .dist-info/sboms/).

The facts are the build's own: versions are read from what was compiled. Components are what ends up in the one native
module: it links to glibc and nothing else, so the packages that `pip` installs beside it are in the wheel's metadata.
"""

from __future__ import annotations

import json
import re
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from process import Failure, run


def document(source: Path, python: Path, work: Path, epoch: int) -> str:
    """source: the unpacked sdist; python: of the environment that built; work: where compiler.py put its wrapper."""
    version = match(source / "pyproject.toml", r'^version = "(.*)"')
    own = component("crossrail", version, "Apache-2.0", f"pkg:pypi/crossrail@{version}") | {"bom-ref": "crossrail"}
    parts = [*compiled_in(source, python), *runtime(work)]
    for part in parts:
        part["bom-ref"] = part["name"]
    content: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": own,
        },
        "components": parts,
        "dependencies": [{"ref": "crossrail", "dependsOn": [part["bom-ref"] for part in parts]}]
        + [{"ref": part["bom-ref"]} for part in parts],
    }
    # A number that is the same for the same content, as everything in the wheel is.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return json.dumps({**content, "serialNumber": f"urn:uuid:{number}"}, indent=2, sort_keys=True) + "\n"


def component(name: str, version: str, licence: str, purl: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "library", "name": name, "licenses": [{"expression": licence}], "purl": purl}
    return entry | ({"version": version} if version else {})


def compiled_in(source: Path, python: Path) -> list[dict[str, Any]]:
    nanobind = run([python, "-c", "import nanobind; print(nanobind.__version__)"], 60).strip()
    libfabric = match(source / "third_party" / "libfabric" / "README.md", r"libfabric (\d+\.\d+\.\d+)")
    return [
        component("nanobind", nanobind, "BSD-3-Clause", f"pkg:pypi/nanobind@{nanobind}"),
        component("robin-map", "", "MIT", "pkg:github/Tessil/robin-map"),  # in nanobind, which does not say which
        component("libfabric-headers", libfabric, "BSD-2-Clause", f"pkg:github/ofiwg/libfabric@v{libfabric}"),
        component("rdma-core-headers", "", "Linux-OpenIB", "pkg:github/linux-rdma/rdma-core"),
    ]


def runtime(work: Path) -> list[dict[str, Any]]:
    """The C++ runtime, which is linked statically."""
    if not (work / "c++").exists():
        return [component("libstdc++", "", "GPL-3.0-or-later WITH GCC-exception-3.1", "pkg:generic/gcc")]
    import ziglang

    zig = Path(ziglang.__file__).parent
    number = match(zig / "lib" / "libcxx" / "include" / "__config", r"_LIBCPP_VERSION (\d+)")
    llvm = f"{int(number) // 10000}.{int(number) // 100 % 100}.{int(number) % 100}"
    licence = "Apache-2.0 WITH LLVM-exception"
    return [component(name, llvm, licence, f"pkg:github/llvm/llvm-project@llvmorg-{llvm}") for name in LLVM_PARTS] + [
        component("compiler-rt-zig", run([zig / "zig", "version"], 60).strip(), "MIT", "pkg:pypi/ziglang"),
    ]


LLVM_PARTS = ["libcxx", "libcxxabi", "libunwind"]


def match(file: Path, pattern: str) -> str:
    found = re.search(pattern, file.read_text(), re.MULTILINE)
    if found is None:
        raise Failure(f"{file} has no line like {pattern}")
    return found[1]
