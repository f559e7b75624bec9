"""The compiler of published wheels: clang with the headers and symbol versions of an old glibc, from PyPI.

A machine's own compiler links to that machine's glibc: symbols of 2.34 and newer on a Debian 12. The package `ziglang`
brings clang, libc++ and descriptions of all glibcs, so that any machine builds for manylinux_2_28.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from pathlib import Path

from process import Failure

GLIBC = (2, 28)
HEADERS = [Path("/usr/include"), Path("/usr/local/include")]


def wrapper(folder: Path) -> Path:
    """A program with a compiler's arguments, for CMake. Its caches are in the folder too: a fresh folder
    builds anew.
    """
    import ziglang

    zig = Path(ziglang.__file__).with_name("zig")
    target = f"{platform.machine()}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    cache = shlex.quote(str(folder / "cache"))
    path = folder / "c++"
    path.write_text(
        "#!/bin/sh\n"
        f"export ZIG_GLOBAL_CACHE_DIR={cache} ZIG_LOCAL_CACHE_DIR={cache}\n"
        f'exec {shlex.quote(str(zig))} c++ -target {target} "$@"\n'
    )
    path.chmod(0o755)
    return path


def verbs_headers(folder: Path) -> Path:
    """A folder with libibverbs' headers only: next to them, in /usr/include, are those of this machine's glibc."""
    for top in HEADERS:
        if (top / "infiniband" / "verbs.h").exists():
            shutil.copytree(top / "infiniband", folder / "infiniband", dirs_exist_ok=True)
            return folder
    raise Failure("a published wheel has the verbs transport, which needs infiniband/verbs.h (Debian: libibverbs-dev)")


def environment(work: Path, own: str | None, epoch: int) -> dict[str, str]:
    """The environment of a build below `work`. No setting of the caller, and no path of this machine, gets into the
    binary.
    """
    kept = ("PATH", "HOME", "LANG", "TMPDIR")
    foreign = ("PIP_", "SSL_", "http", "HTTP", "no_proxy", "NO_PROXY")
    env = {name: value for name, value in os.environ.items() if name in kept or name.startswith(foreign)}
    return env | {
        "CXX": own or str(wrapper(work)),
        # -O3 and -s also for what CMake tries the compiler with: zig compiles its libraries anew for programs that are
        # not optimised or not stripped, which takes 100 s.
        "CXXFLAGS": f"-O3 -s -ffile-prefix-map={work}=. -Wno-builtin-macro-redefined -U__DATE__ -U__TIME__",
        "CMAKE_ARGS": f"-DCROSSRAIL_VERBS=ON -DCROSSRAIL_VERBS_INCLUDE_DIR={verbs_headers(work / 'include')}",
        "SOURCE_DATE_EPOCH": str(epoch),
    }
