"""Environment variables that change what runs in this process, intended or not."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from crossrail.doctor.finding import Finding, Fix, error, note, ok, warning
from crossrail.doctor.host import Host
from crossrail.doctor.remedies import listing
from crossrail.tls import open_to

_FOREIGN = ("NCCL_", "UCX_", "NIXL_", "MC_", "NVSHMEM_", "UCCL_", "OFI_NCCL_", "RDMAV_", "IBV_", "MLX5_")
_INTERPOSERS = ("libvma", "libxlio", "librspreload", "libsdp", "libeatmydata", "libfaketime", "libnss_wrapper")
_SECRET = "CROSSRAIL_SECRET"
_TLS_FILES = ("CROSSRAIL_TLS_CERT", "CROSSRAIL_TLS_KEY", "CROSSRAIL_TLS_CA")
_SECRET_SHORT = 16
_SECRET_BYTES_MAX = 1024
_OFF = ("0", "no", "false", "off", "n")
_ON = ("1", "yes", "true", "on", "y")


def libfabric(host: Host) -> Iterator[Finding]:
    """FI_*: libfabric's own, read by every program that opens it."""
    environ = host.environ
    has_efa = any(device.kind == "efa" for device in host.hardware.rdma)
    provider = environ.get("FI_PROVIDER")
    if provider is not None:
        allowed = provider.lower().lstrip("^").replace(";", ",").split(",")
        excludes_efa = ("efa" in allowed) == provider.startswith("^")
        if has_efa and excludes_efa:
            yield error(
                "environment.fi-provider",
                f"FI_PROVIDER={provider} hides the EFA devices",
                "environment of this process",
                "libfabric offers no efa provider here: TCP, at a few per cent of the bandwidth",
                Fix("unset FI_PROVIDER"),
            )
        else:
            yield note(
                "environment.fi-provider",
                f"FI_PROVIDER={provider} restricts libfabric to what it names",
                "environment of this process",
                "providers that are not named do not exist for any program started from here",
                Fix("unset FI_PROVIDER"),
            )
    if environ.get("FI_EFA_USE_DEVICE_RDMA", "").lower() in _OFF:
        yield warning(
            "environment.fi-efa-rdma",
            "FI_EFA_USE_DEVICE_RDMA switches EFA's RDMA off",
            f"FI_EFA_USE_DEVICE_RDMA={environ['FI_EFA_USE_DEVICE_RDMA']}",
            "writes are emulated by messages that the target's CPU copies",
            Fix("unset FI_EFA_USE_DEVICE_RDMA"),
        )
    for name in ("FI_EFA_IFACE", "FI_TCP_IFACE", "FI_VERBS_IFACE"):
        if name in environ and environ[name] != "all":
            yield note(
                f"environment.{name.lower().replace('_', '-')}",
                f"{name}={environ[name]} leaves out other interfaces",
                "environment of this process",
                "rails that it does not name are missing without a word",
                Fix(f"unset {name}"),
            )
    if environ.get("FI_LOG_LEVEL", "").lower() in ("debug", "trace", "info"):
        yield note(
            "environment.fi-log",
            f"FI_LOG_LEVEL={environ['FI_LOG_LEVEL']}",
            "environment of this process",
            "libfabric writes lines on its data path: rates are those of the log",
            Fix("unset FI_LOG_LEVEL"),
        )


def secret(host: Host) -> Iterator[Finding]:
    """The secret, which keeps strangers out of engines that listen with tcp. Its value is never shown."""
    check = "environment.secret"
    value = host.environ.get(_SECRET)
    make = Fix(f"export {_SECRET}=$(openssl rand -hex 32)", "the same value on every host")
    seen = f"environment of this process: {_SECRET}"
    if not value:
        yield note(
            check,
            f"no {_SECRET}: tcp peers need nothing but an engine's address",
            seen,
            "whoever intercepts addresses or descriptors, and reaches the port, may write into the regions they name; "
            "with or without it nothing is encrypted: that is TLS (docs/two-hosts.md)",
            make,
        )
    elif value != value.strip():
        yield warning(
            check,
            f"{_SECRET} begins or ends with white space",
            seen,
            "it counts: a host where it was set without it, or a file's last newline, and handshakes are refused",
            make,
        )
    elif len(value.encode(errors="surrogateescape")) > _SECRET_BYTES_MAX:
        yield error(check, f"{_SECRET} is longer than {_SECRET_BYTES_MAX} bytes", seen, "no tcp engine opens", make)
    elif len(value) < _SECRET_SHORT:
        yield warning(
            check,
            f"{_SECRET} has only {len(value)} characters",
            seen,
            "who records one handshake can try all short secrets in peace",
            make,
        )
    else:
        yield ok(check, f"{_SECRET} is set", seen)


def tls(host: Host) -> Iterator[Finding]:
    """Certificates for tcp. Not having set them is no finding: a private network needs none."""
    check = "environment.tls"
    files = {name: host.environ.get(name, "") for name in _TLS_FILES}
    named = {name: path for name, path in files.items() if path}
    seen = f"environment of this process: {listing(list(named))}"
    lost = [f"{name}={path}" for name, path in named.items() if not host.exists(path)]
    if not named:
        return
    if len(named) < len(files):
        missing = next(name for name in files if name not in named)
        yield error(
            check,
            f"{next(iter(named))} is set and {missing} is not",
            seen,
            "no tcp engine opens: TLS needs a certificate, its key and a CA",
            Fix(f"export {missing}=FILE.pem"),
        )
    elif lost:
        yield error(check, f"{listing(lost)} is not there", seen, "no tcp engine opens")
    else:
        yield ok(check, "tcp is under TLS: its certificate, key and CA are there", seen)
        yield from _tls_key(host, files["CROSSRAIL_TLS_KEY"])


def _tls_key(host: Host, path: str) -> Iterator[Finding]:
    mode = host.mode(path)
    if mode is None or not (others := open_to(mode)):
        return
    yield warning(
        "environment.tls-key",
        f"CROSSRAIL_TLS_KEY={path} is open to {others}",
        f"mode {mode:04o}",
        "who has the key can pose as this host's engines",
        Fix(f"chmod 600 {shlex.quote(path)}"),
    )


def fork_safety(host: Host) -> Iterator[Finding]:
    """Settings that make registered memory survive fork, at a price."""
    on = [
        f"{name}={host.environ[name]}"
        for name in ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "FI_EFA_FORK_SAFE")
        if host.environ.get(name, "").lower() not in ("", *_OFF)
    ]
    if on:
        yield note(
            "environment.fork-safe",
            f"{listing(on)}: registered memory is marked for fork",
            "environment of this process",
            "every registration walks the pages and splits mappings, and huge pages are not used by libfabric's "
            "EFA; kernels since 5.12 copy registered pages at fork by themselves",
            Fix("; ".join(f"unset {text.partition('=')[0]}" for text in on), "and start workers with spawn"),
        )


def foreign(host: Host) -> Iterator[Finding]:
    """Variables of other libraries. They do not affect us, though people expect it. Values may be secrets."""
    names = sorted(name for name in host.environ if name.startswith(_FOREIGN))
    if names:
        yield note(
            "environment.foreign",
            f"variables of other libraries: {listing(names)}",
            f"environment of this process, names that begin with {', '.join(_FOREIGN[:4])} ...",
            "crossrail does not read those of NCCL, UCX, NIXL and Mooncake: devices and GIDs chosen there are "
            "not chosen here. libibverbs reads RDMAV_*, IBV_* and MLX5_* in every process",
        )


def preload(host: Host) -> Iterator[Finding]:
    """Libraries put in front of all others."""
    check = "environment.ld-preload"
    words = host.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    lost = [word for word in words if word.startswith("/") and not host.exists(word)]
    catching = [word for word in words if word.rpartition("/")[2].startswith(_INTERPOSERS)]
    if lost:
        yield note(
            check,
            f"LD_PRELOAD names {listing(lost)}, which is not there",
            "environment of this process",
            "the loader prints an error line at each start of each program, and continues",
            Fix("unset LD_PRELOAD"),
        )
    if catching:
        yield warning(
            check,
            f"LD_PRELOAD puts {listing(catching)} between programs and the kernel",
            "environment of this process",
            "socket or time calls are replaced: passed file descriptors, deadlines and death of peers may not work",
            Fix("env -u LD_PRELOAD COMMAND"),
        )
    elif words and not lost:
        yield note(
            check,
            f"LD_PRELOAD loads {listing(words)} into every process",
            "environment of this process",
            "allocators are harmless; what wraps sockets, mmap or verbs is not",
        )
    path = host.environ.get("LD_LIBRARY_PATH")
    if path:
        yield note(
            "environment.ld-library-path",
            "LD_LIBRARY_PATH decides which libraries are found first",
            path,
            "the first libfabric, libibverbs or libcuda of these folders is used; under `libraries` stands which",
        )


def cuda(host: Host) -> Iterator[Finding]:
    """Which GPUs exist for CUDA, and what its allocator does."""
    environ = host.environ
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    count = len(host.hardware.gpu_nodes)
    if visible is not None and host.hardware.has_gpu:
        words = [word.strip() for word in visible.split(",") if word.strip()]
        indices = [int(word) for word in words if word.lstrip("-").isdecimal() and len(word) < 6]
        if not words or words[0] == "-1" or words[0].lower() in ("nodevfiles", "none"):
            yield note(
                "environment.cuda-visible",
                f"CUDA_VISIBLE_DEVICES={visible!r} hides all GPUs",
                "environment of this process",
                "GPU memory cannot be used here",
                Fix("unset CUDA_VISIBLE_DEVICES"),
            )
        elif count and any(not 0 <= index < count for index in indices):
            yield warning(
                "environment.cuda-visible",
                f"CUDA_VISIBLE_DEVICES={visible} names a GPU that is not there",
                f"{count} GPU(s) at /dev/nvidia*",
                "CUDA ignores it and every GPU named after it",
                Fix(f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(count)))}"),
            )
        else:
            yield ok("environment.cuda-visible", f"CUDA_VISIBLE_DEVICES={visible}", f"{count} GPU(s) at /dev/nvidia*")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environ.get(name, "").lower().replace(" ", ""):
            make = warning if host.hardware.nics else note
            yield make(
                "environment.expandable-segments",
                f"{name} turns expandable segments on",
                f"{name}={environ[name]}",
                "such GPU memory cannot be registered through peermem (EINVAL at the first transfer, or a silent "
                "copy through "
                "the host: others measured 0.3 instead of 200 GB/s); it takes dma-buf, segment by segment",
                Fix(f"export {name}=expandable_segments:False"),
            )
    if environ.get("CUDA_LAUNCH_BLOCKING", "").lower() in _ON:
        yield note(
            "environment.cuda-blocking",
            "CUDA_LAUNCH_BLOCKING makes every kernel launch wait",
            "environment of this process",
            "transfers and computation do not overlap",
            Fix("unset CUDA_LAUNCH_BLOCKING"),
        )


def python(host: Host) -> Iterator[Finding]:
    """Debugging aids that were forgotten."""
    on = [name for name in ("PYTHONASYNCIODEBUG", "PYTHONDEVMODE", "PYTHONTRACEMALLOC") if host.environ.get(name)]
    if "debug" in host.environ.get("PYTHONMALLOC", ""):
        on.append("PYTHONMALLOC")
    if on:
        yield note(
            "environment.python-debug",
            f"Python runs with debugging on: {listing(on)}",
            "environment of this process",
            "each call costs several times as much",
            Fix("unset " + " ".join(on)),
        )
