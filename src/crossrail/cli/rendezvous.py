"""How two shells of a host find each other: a name is an address file in a directory that only this user can enter.

A `crossrail serve` holds a lock on its file for as long as it runs; the kernel releases the lock when the process ends,
however it ends. So a file whose lock is free is a leftover, and whoever finds it removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

import crossrail as xr
from crossrail._files import read_at_most
from crossrail._text import plain
from crossrail.cli import meeting
from crossrail.errors import CrossrailError, UsageError

_FORMAT = 1
_FILE_BYTES_MAX = 16 * 1024
_SUFFIX = ".serve"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ATTEMPTS_MAX = 100


def runtime_dir() -> Path:
    """The directory, made if missing. CrossrailError when another user could have put files into it."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(base) / "crossrail" if base else Path(tempfile.gettempdir()) / f"crossrail-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise CrossrailError(
            f"cannot make {directory}: {error.strerror}; set XDG_RUNTIME_DIR to a directory that you own"
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise CrossrailError(
            f"{directory} must be a directory that belongs to you, with mode 0700; remove it and retry"
        )
    return directory


def check_name(name: str) -> str:
    """The name, or UsageError."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"name {name!r} must be 1 to 64 letters, digits, dots, dashes or underscores")
    return name


class Published:
    """A name that leads to an address, until close(). A context manager."""

    def __init__(self, name: str, path: Path, lock_fd: int) -> None:
        """Made by `publish`. lock_fd: the open, locked file."""
        self.name = name
        self.path = path
        self._lock_fd = lock_fd

    def __enter__(self) -> Published:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self._lock_fd)


def publish(name: str | None, address: xr.Address) -> Published:
    """Make `name` lead to `address`. None: "inbox", or "inbox-2" and so on while that is taken.

    UsageError when a name that was asked for is taken by a running serve.
    """
    if name is not None:
        published = _try_publish(check_name(name), address)
        if published is None:
            raise UsageError(f"another crossrail serve runs under the name {name}; choose another one with --name")
        return published
    for number in range(1, _ATTEMPTS_MAX):
        published = _try_publish("inbox" if number == 1 else f"inbox-{number}", address)
        if published is not None:
            return published
    raise CrossrailError(f"{_ATTEMPTS_MAX} serves run already; give this one a name with --name")


def _try_publish(name: str, address: xr.Address) -> Published | None:
    directory = runtime_dir()
    try:
        return _publish_in(directory, name, address)
    except OSError as error:  # it is full, or may not be written to
        raise CrossrailError(
            f"cannot leave the address of this serve in {directory}: {error.strerror}; make room there, or set "
            "XDG_RUNTIME_DIR to another directory, in the shells that push as well"
        ) from None


def _publish_in(directory: Path, name: str, address: xr.Address) -> Published | None:
    final = directory / (name + _SUFFIX)
    draft_fd, draft = tempfile.mkstemp(prefix=".draft-", dir=directory)
    try:
        fcntl.flock(draft_fd, fcntl.LOCK_EX)
        os.write(draft_fd, _encode(address))
        for _ in range(_ATTEMPTS_MAX):
            try:
                os.link(draft, final)  # unlike a rename, this fails if the name exists
                return Published(name, final, draft_fd)
            except FileExistsError:
                if _is_alive(final, remove=True):
                    break
        os.close(draft_fd)
        return None
    except BaseException:
        os.close(draft_fd)
        raise
    finally:
        Path(draft).unlink()


def _encode(address: xr.Address) -> bytes:
    content = {"format": _FORMAT, "crossrail": xr.__version__, "host": _host_identity(), "pid": os.getpid()}
    return json.dumps(content | {"address": address.to_bytes().hex()}).encode()


def _host_identity() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown-host"  # some sandboxes hide it


def _is_alive(path: Path, *, remove: bool) -> bool:
    """Whether a serve holds the file. remove: a leftover goes away; only for files that are ours by their place."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # We hold the leftover's lock. Remove the name only if it still leads to this file: only a holder may do that.
        with contextlib.suppress(FileNotFoundError):
            if remove and path.stat().st_ino == os.fstat(fd).st_ino:
                path.unlink()
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def living_names() -> list[str]:
    """Names of the serves that run. Leftovers are removed on the way."""
    paths = sorted(runtime_dir().glob("*" + _SUFFIX))
    return [path.name.removesuffix(_SUFFIX) for path in paths if _is_alive(path, remove=True)]


def resolve(target: str, secret: bytes = b"") -> tuple[xr.Address, str]:
    """`NAME:DST` or `tcp://HOST[:PORT]/DST` -> (address of that serve, DST). DST may be empty.

    NAME is the name of a serve, or the path of an address file (it has a slash in it). secret: shared with serves on
    other hosts. CrossrailError when no such serve runs.
    """
    if target.startswith(meeting.SCHEME):
        host, port, dst = meeting.split_url(target)
        return meeting.ask(host, port, secret), dst
    if target.startswith("["):
        raise UsageError(f"{target}: another host is tcp://{target.partition('/')[0]}/")
    name, _, dst = target.partition(":")
    if dst.startswith("//"):
        raise UsageError(f"{target}: {name}:// leads to no crossrail serve; another host is tcp://HOST:PORT/DST")
    by_path = "/" in name
    path = Path(name) if by_path else runtime_dir() / (check_name(name) + _SUFFIX)
    if not _is_alive(path, remove=not by_path):
        ended = f"no crossrail serve holds {name}: it has ended, or this is not the file of its address"
        raise CrossrailError(ended if by_path else _no_such_serve(name))
    return _read_address(path), dst


class _OtherFormat(Exception):
    """The address file has another format: nothing else in it is read."""


def _no_such_serve(name: str) -> str:
    names = living_names()
    running = f"running: {', '.join(names)}" if names else "none is running; start one with: crossrail serve"
    return (
        f"no crossrail serve of this user named {name!r} is known in {runtime_dir()} ({running}). With another "
        "XDG_RUNTIME_DIR there it is in another folder; on other hosts: tcp://HOST:PORT/"
    )


def _read_address(path: Path) -> xr.Address:
    try:
        content: Any = json.loads(read_at_most(path, _FILE_BYTES_MAX, "address file of crossrail serve"))
        if (theirs := content["format"]) != _FORMAT:
            release = plain(str(content.get("crossrail", "of an unknown release"))[:64])
            raise _OtherFormat(
                f"{path} was written by crossrail {release} (format {plain(str(theirs)[:64])}), and this is crossrail "
                f"{xr.__version__} (format {_FORMAT}): use one release in both shells"
            )
        host, text = content["host"], content["address"]
        address = xr.Address.from_bytes(bytes.fromhex(text))
    except _OtherFormat as error:
        raise UsageError(str(error)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is not an address file of crossrail serve: {error}") from None
    if host != _host_identity():
        raise UsageError(f"{path} is of another host; a server there is reached by tcp://HOST:PORT/ (serve --listen)")
    return address
