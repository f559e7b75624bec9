"""Runs a command in a throw-away virtual machine with Soft-RoCE NICs, and ends with the command's status.

The guest sees the host's files, read-only below an overlay in its memory, at the same paths: the host's Python,
libibverbs and a build just made work in it, and there is no image to keep. It has no network card: nothing gets out.
Its command runs as root of the guest; qemu needs no privileges. Statuses of our own: 124 the limit ran out, 125 this
machine cannot, or the guest died.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernel import HERE, Kernel, VmError, prepared

ROOT = HERE.parents[1]
TIMED_OUT = 124
CANNOT = 125
# The caller's environment variables that the guest's command gets.
VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TERM", "VIRTUAL_ENV", "CI", "PIP_FIND_LINKS")
OUR_PREFIX = "CROSSRAIL_"
PR_SET_PDEATHSIG = 1
# Programs the run needs, by the Debian package that has them.
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "depmod": "kmod",
    "ip": "iproute2",
    "ibv_devices": "ibverbs-utils",
    "ib_write_bw": "perftest",
}
LIBRARIES = {
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
    "/usr/lib/python3/dist-packages/pyverbs": "python3-pyverbs",
}


def missing_packages() -> list[str]:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    programs = [package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None]
    return programs + [package for file, package in LIBRARIES.items() if not Path(file).exists()]


def why_not() -> str:
    """Why no guest can run here; empty: it can."""
    if os.uname().machine != "x86_64":
        return f"the guest's kernel is for x86_64, this is {os.uname().machine}"
    if missing := missing_packages():
        return f"not installed: {' '.join(missing)}"
    return ""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev vm",
        usage="./dev vm [options] (test [ARGS for pytest] | bench [ARGS] | -- COMMAND...)",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nics", type=int, default=4, help="Soft-RoCE NICs (4)")
    parser.add_argument("--timeout", type=float, default=660, metavar="S", help="the guest's longest life (660)")
    parser.add_argument("--memory", type=int, default=4096, metavar="MIB", help="its memory (4096)")
    parser.add_argument("--cpus", type=int, default=2, help="its processors (2)")
    parser.add_argument("--mtu", type=int, default=9000, help="9000 gives RDMA packets of 4096, 1500 of 1024")
    parser.add_argument("--writable", action="append", default=[], metavar="DIR", help="the guest may write there")
    parser.add_argument("--console", metavar="FILE", help="keep the guest's kernel log here")
    parser.add_argument("--accelerator", choices=["auto", "tcg", "kvm"], default="auto", help="of qemu (auto)")
    parser.add_argument("--check", action="store_true", help="only say whether a guest can run here: status 0, or 125")
    parser.add_argument("--missing", action="store_true", help="only name the packages that are not installed")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    elif options.command:
        options.command = ["bash", str(HERE / f"{options.command[0]}.sh"), *options.command[1:]]
        if not Path(options.command[1]).exists():
            parser.error("what to run: test, bench, or -- and a command")
    elif not (options.check or options.missing):
        parser.error("nothing to run: test, bench, or -- and a command")
    if not 1 <= options.nics <= 200:
        parser.error("--nics: 1 to 200")
    return options


def accelerator(wanted: str) -> str:
    """KVM where it is the real one: what other hypervisors offer under that name does not boot a plain kernel."""
    if wanted == "auto":
        real = any(Path("/sys/module", module).exists() for module in ("kvm_intel", "kvm_amd"))
        wanted = "kvm" if real and os.access("/dev/kvm", os.W_OK) else "tcg"
    return "tcg,thread=multi" if wanted == "tcg" else wanted


# --- what the guest reads ---


def write_control(folder: Path, options: argparse.Namespace) -> None:
    names = [name for name in os.environ if name in VARIABLES or name.startswith(OUR_PREFIX)]
    lines = [f"export {name}={shlex.quote(os.environ[name])}" for name in names]
    lines.append(f"export CROSSRAIL_VM=1 CROSSRAIL_VM_NICS={options.nics}")
    lines.append("ulimit -l unlimited; ulimit -c 0")
    lines.append(f"cd {shlex.quote(str(Path.cwd()))} || exit {CANNOT}")
    lines.append(f"exec {shlex.join(options.command)}")
    (folder / "command.sh").write_text("\n".join(lines) + "\n")
    (folder / "settings.sh").write_text(f"VM_NICS={options.nics}\nVM_MTU={options.mtu}\n")
    (folder / "nics.sh").write_text((HERE / "nics.sh").read_text())
    (folder / "writable").write_text("".join(f"{path}\n" for path in writable(options)))


def writable(options: argparse.Namespace) -> list[Path]:
    folders = [Path(name).resolve() for name in options.writable]
    for folder in folders:
        if not folder.is_dir():
            raise VmError(f"--writable: no folder {folder}")
    return folders


# --- qemu ---


def qemu_command(kernel: Kernel, options: argparse.Namespace, scratch: Path, ports: dict[str, int]) -> list[str]:
    command = ["qemu-system-x86_64", "-nodefaults", "-display", "none", "-no-reboot", "-nic", "none"]
    # q35: the older machine does not always power off.
    command += ["-M", "q35", "-cpu", "max", "-accel", accelerator(options.accelerator)]
    command += ["-m", str(options.memory), "-smp", str(options.cpus)]
    # tsc=reliable: under emulation the kernel would give up that clock after 20 s. oops=panic: it counts as death.
    command += ["-kernel", str(kernel.image), "-initrd", str(kernel.initramfs)]
    command += ["-append", "console=ttyS0 quiet panic=-1 oops=panic tsc=reliable mitigations=off audit=0"]
    command += ["-serial", f"file:{scratch / 'console'}", "-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]
    for index, (name, fd) in enumerate(ports.items()):
        command += ["-add-fd", f"fd={fd},set={index}", "-chardev", f"file,id={name},path=/dev/fdset/{index},append=on"]
        command += ["-device", f"virtserialport,chardev={name},name={name}"]
    command += share("root", Path("/"), "readonly=on,multidevs=remap")
    command += share("control", scratch / "control", "readonly=on")
    for index, folder in enumerate(writable(options)):
        command += share(f"writable{index}", folder, "readonly=off")
    return command


def share(tag: str, folder: Path, options: str) -> list[str]:
    source = f"local,id={tag},path={folder},security_model=none,{options}"
    return ["-fsdev", source, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]


@contextlib.contextmanager
def forwarded(target: int) -> Iterator[int]:
    """A pipe whose content is copied to `target`: qemu needs a write-only descriptor. All of it is copied
    at the end.
    """
    reader, writer = os.pipe()

    def pump() -> None:
        while data := os.read(reader, 1 << 16):
            while data:
                data = data[os.write(target, data) :]

    thread = threading.Thread(target=pump, daemon=True)
    thread.start()
    try:
        yield writer
    finally:
        os.close(writer)
        thread.join(timeout=10)
        os.close(reader)


def die_with_us() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_guest(kernel: Kernel, options: argparse.Namespace, scratch: Path) -> int:
    (scratch / "control").mkdir()
    write_control(scratch / "control", options)
    deadline = time.monotonic() + options.timeout
    with (
        (scratch / "status").open("wb") as status,
        (scratch / "qemu").open("wb") as words,
        forwarded(1) as out,
        forwarded(2) as err,
    ):
        ports = {"out": out, "err": err, "status": status.fileno()}
        process = subprocess.Popen(
            qemu_command(kernel, options, scratch, ports),
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            pass_fds=list(ports.values()),
            preexec_fn=die_with_us,
        )
        try:
            ended = process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            process.kill()
            process.wait()
    return verdict(scratch, ended, options)


def verdict(scratch: Path, ended: int | None, options: argparse.Namespace) -> int:
    console = (scratch / "console").read_text(errors="replace") if (scratch / "console").exists() else ""
    if options.console:
        Path(options.console).write_text(console)
    text = (scratch / "status").read_text().strip()
    if text:
        for sign in ("WARNING: CPU", "BUG: ", "general protection"):
            if sign in console:
                say(f"the guest's kernel complained ({sign.strip()}): --console FILE keeps its log")
        return int(text)
    if ended is None:
        say(f"no end after {options.timeout:.0f} s; the end of the guest's log:\n{tail(console)}")
        return TIMED_OUT
    raise VmError(f"the guest died (qemu: {ended}): {(scratch / 'qemu').read_text()}\n{tail(console)}")


def tail(text: str) -> str:
    return "\n".join(text.splitlines()[-40:])


def say(text: str) -> None:
    print(f"vm: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.missing:
        print(" ".join(missing_packages()))
        return 0
    if reason := why_not():
        raise VmError(reason)
    kernel = prepared(Path(os.environ.get("CROSSRAIL_VM_CACHE") or ROOT / "build" / "vm"))
    if options.check:
        return 0
    with tempfile.TemporaryDirectory(prefix="crossrail-vm.") as scratch:
        return run_guest(kernel, options, Path(scratch))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except (VmError, OSError, subprocess.SubprocessError) as error:
        say(f"cannot: {error}")
        sys.exit(CANNOT)
    except KeyboardInterrupt:
        sys.exit(130)
