"""The licences of what is compiled into a wheel, taken from what was compiled: packages, and heads of header files."""

from __future__ import annotations

import re
from pathlib import Path

from process import Failure, run

LINE = "License-File: "


def add(info: Path, inside: Path, work: Path) -> None:
    """Into a wheel's .dist-info. inside: the Python that built it, work: where compiler.py put what it gave."""
    texts = collect(inside, work)
    for name, text in texts.items():
        path = info / "licenses" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    metadata = info / "METADATA"
    head, line, rest = metadata.read_text().partition(LINE)
    if not line:
        raise Failure(f"{metadata} names no licence")
    metadata.write_text(head + "".join(f"{LINE}{name}\n" for name in texts) + line + rest)


def collect(inside: Path, work: Path) -> dict[str, str]:
    nanobind = Path(run([inside, "-c", "import nanobind; print(nanobind.__path__[0])"], 60).strip())
    found = [*nanobind.parent.glob("nanobind-*.dist-info/licenses/LICENSE")]
    if len(found) != 1:
        raise Failure(f"nanobind's licence is not beside {nanobind}")
    texts = {
        "third_party/nanobind.txt": found[0].read_text(),
        "third_party/robin-map.txt": head(nanobind / "ext" / "robin_map" / "include" / "tsl" / "robin_map.h"),
        "third_party/rdma-core.txt": head(work / "include" / "infiniband" / "verbs.h"),
    }
    if (work / "c++").exists():
        import ziglang

        zig = Path(ziglang.__file__).parent
        texts["third_party/zig.txt"] = (zig / "LICENSE").read_text()
        texts["third_party/llvm.txt"] = (zig / "lib" / "libcxx" / "LICENSE.TXT").read_text()
    return texts


def head(header: Path) -> str:
    """The comment that a header file begins with."""
    comment = re.match(r"\s*/\*+\n(.*?)\*/", header.read_text(), re.DOTALL)
    if comment is None:
        raise Failure(f"{header} does not begin with a comment")
    return "".join(line.strip().removeprefix("*").removeprefix(" ") + "\n" for line in comment[1].splitlines())
