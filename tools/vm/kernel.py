"""The guest's kernel and first file system: two small files made once from a Debian kernel package, and kept."""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUSYBOX = Path("/bin/busybox")
# The first one that apt knows. Cloud flavours have neither rdma_rxe nor 9p; Linux 6.1 gives up a write with an
# immediate whose peer has no receive posted, which no NIC does.
PACKAGES = ("linux-image-6.12-amd64", "linux-image-amd64")
# In load order each with what it needs. crc32_generic: rdma_rxe asks for that digest without saying so.
MODULES = (
    *("virtio_pci", "virtio_console", "virtio-rng", "9p", "9pnet_virtio", "overlay"),
    *("crc32_generic", "crc32-pclmul", "ib_uverbs", "rdma_ucm", "rdma_rxe"),
    *("veth", "bridge", "sch_netem", "sch_tbf"),
)
DOWNLOAD_TIMEOUT_S = 600


class VmError(Exception):
    """The machine cannot run the guest, or the guest died: no verdict on what was to run in it."""


@dataclass(frozen=True)
class Kernel:
    image: Path
    initramfs: Path


def prepared(cache: Path) -> Kernel:
    """The guest's files, cached or made now. Of several concurrent callers one makes them, the others wait."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        package = newest_package()
        if package is None and (kept := latest_kept(cache)):
            return files(kept)
        if package is None and os.geteuid() == 0 and shutil.which("apt-get"):
            run(["apt-get", "-qq", "update"])
            package = newest_package()
        if package is None:
            raise VmError(f"apt knows none of these kernels: {', '.join(PACKAGES)} (apt-get update?)")
        folder = cache / f"{package}.{recipe()}"
        if not folder.exists():
            make(package, folder)
            for old in cache.glob("linux-image-*"):
                if old != folder:
                    shutil.rmtree(old)
        return files(folder)


def files(folder: Path) -> Kernel:
    return Kernel(folder / "vmlinuz", folder / "initramfs")


def recipe() -> str:
    text = " ".join(MODULES) + (HERE / "init.sh").read_text()
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def latest_kept(cache: Path) -> Path | None:
    """The newest kernel among those prepared with the present recipe. Needs no apt lists."""
    return max(cache.glob(f"linux-image-*.{recipe()}"), key=lambda folder: folder.stat().st_mtime, default=None)


def newest_package() -> str | None:
    """The package with the files, which the one with the steady name depends on."""
    if shutil.which("apt-cache") is None:
        return None
    for package in PACKAGES:
        shown = subprocess.run(
            ["apt-cache", "--no-all-versions", "show", package], capture_output=True, text=True, timeout=60
        )
        for line in shown.stdout.splitlines():
            if line.startswith("Depends: linux-image-"):
                return line.removeprefix("Depends: ").split()[0].rstrip(",")
    return None


def make(package: str, folder: Path) -> None:
    # In the cache: apt's own user may not write in a folder of root's, and the download is large.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making.") as scratch_name:
        scratch = Path(scratch_name)
        unpack(package, scratch)
        root = scratch / "root"
        version = next((root / "lib/modules").iterdir()).name
        made = scratch / "made"
        made.mkdir()
        shutil.copy(root / "boot" / f"vmlinuz-{version}", made / "vmlinuz")
        pack_initramfs(scratch / "initramfs", made / "initramfs", modules(root, version))
        made.rename(folder)


def unpack(package: str, scratch: Path) -> None:
    user = f"APT::Sandbox::User={os.environ.get('USER', 'root')}"
    run(["apt-get", "-qq", "-o", user, "-o", "Acquire::Retries=3", "download", package], cwd=scratch)
    (archive,) = scratch.glob("*.deb")
    run(["dpkg-deb", "-x", str(archive), "root"], cwd=scratch)
    archive.unlink()


def modules(root: Path, version: str) -> list[Path]:
    """The ones of MODULES that this kernel has not built in, each after those it needs."""
    run(["depmod", "-b", str(root), version])
    needed: dict[Path, None] = {}
    for module in MODULES:
        command = ["modprobe", "-d", str(root), "-S", version, "--show-depends", module]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
        for line in shown.stdout.splitlines():
            if line.startswith("insmod "):
                needed[Path(line.split()[1])] = None
    if not any(path.name.startswith("rdma_rxe.ko") for path in needed):
        raise VmError(f"kernel {version} has no rdma_rxe")
    return list(needed)


def pack_initramfs(folder: Path, archive: Path, modules: list[Path]) -> None:
    for name in ("bin", "modules", "dev", "proc", "sys"):
        (folder / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, folder / "bin/busybox")
    shutil.copy(HERE / "init.sh", folder / "init")
    (folder / "init").chmod(0o755)
    names = []
    for path in modules:
        name = path.name.removesuffix(".xz")
        content = path.read_bytes()
        (folder / "modules" / name).write_bytes(lzma.decompress(content) if path.suffix == ".xz" else content)
        names.append(name)
    (folder / "modules/order").write_text("".join(f"{name}\n" for name in names))
    listing = "\n".join(str(path.relative_to(folder)) for path in sorted(folder.rglob("*")))
    with archive.open("wb") as out:
        command = ["cpio", "--create", "--format=newc", "--quiet"]
        subprocess.run(command, cwd=folder, input=listing.encode(), stdout=out, check=True, timeout=60)


def run(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    if done.returncode != 0:
        raise VmError(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
