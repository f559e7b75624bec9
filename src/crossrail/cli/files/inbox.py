"""The directory that `serve` stores into. Nothing a pusher sends makes it write elsewhere or leave half a file.

Paths are walked component by component with descriptors that refuse symbolic links, so neither ".." nor a link planted
in the directory leads out of it. A file is written under a temporary name and renamed in one step when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from crossrail.errors import CrossrailError, UsageError

_COMPONENT_BYTES_MAX = 255
_DEPTH_MAX = 32
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PART_SUFFIX = ".crossrail-part"
# Left free on the file system: filling it to the last byte harms more than the refused push.
_SPARE_BYTES = 16 << 20
_SHOWN_MAX = 80
# How file systems say that they have no unnamed files.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class FileRefused(CrossrailError):
    """The push cannot be stored. The text says why, to the pusher."""


def split_path(dst: str) -> list[str]:
    """Components of a relative path, or FileRefused."""
    components = dst.split("/")
    if dst.startswith("/"):
        raise FileRefused(f"{_shown(dst)} is an absolute path; give one relative to the served directory")
    if len(components) > _DEPTH_MAX:
        raise FileRefused(f"{_shown(dst)} is deeper than {_DEPTH_MAX} directories")
    for component in components:
        if component in ("", ".", ".."):
            raise FileRefused(f"{_shown(dst)} has an empty, '.' or '..' component")
        if len(component.encode()) > _COMPONENT_BYTES_MAX:
            raise FileRefused(f"{_shown(dst)} has a component longer than {_COMPONENT_BYTES_MAX} bytes")
        if not component.isprintable():
            raise FileRefused(f"{_shown(dst)} has unprintable characters")
    if components[-1].endswith(_PART_SUFFIX):
        raise FileRefused(f"{_shown(dst)} ends with {_PART_SUFFIX}, which is kept for files that are still coming in")
    return components


class Inbox:
    """An open directory. A context manager."""

    def __init__(self, root: Path) -> None:
        """OSError when it is no directory that can be entered."""
        self.root = root
        self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)

    def check_writable(self) -> None:
        """UsageError when no file can be made here: better at the start than at each push."""
        fd = os.dup(self._fd)
        try:
            PartFile(fd, "", str(self.root), force=False).discard()
        except FileRefused as refusal:
            os.close(fd)
            raise UsageError(f"--dir {refusal}; choose another, or give this user the right to write there") from None

    def create(self, dst: str, nbytes: int, *, force: bool) -> PartFile:
        """A file that will become `dst`. FileRefused when it must not or cannot."""
        components = split_path(dst)
        try:
            return self._create(components, dst, nbytes, force)
        except OSError as error:  # a directory that may not be searched, no descriptors, a file system that fails
            raise FileRefused(f"{_shown(dst)}: cannot be stored at the target: {error.strerror}") from None

    def _create(self, components: list[str], dst: str, nbytes: int, force: bool) -> PartFile:
        if os.fstat(self._fd).st_nlink == 0:
            raise FileRefused(f"{_shown(dst)} cannot be stored: the served directory was deleted at the target")
        status = os.fstatvfs(self._fd)
        free_bytes = status.f_bavail * status.f_frsize
        if nbytes + _SPARE_BYTES > free_bytes:
            raise FileRefused(
                f"{nbytes} bytes do not fit: {free_bytes} are free at the target, which keeps {_SPARE_BYTES} free"
            )
        directory_fd = self._enter(components[:-1], dst)
        try:
            _check_final(directory_fd, components[-1], dst, force)
            return PartFile(directory_fd, components[-1], dst, force)
        except BaseException:
            os.close(directory_fd)
            raise

    def _enter(self, directories: list[str], dst: str) -> int:
        fd = os.dup(self._fd)
        for directory in directories:
            try:
                inner = os.open(directory, _DIRECTORY_FLAGS, dir_fd=fd)
            except OSError as error:
                raise FileRefused(
                    f"{_shown(dst)}: cannot enter {directory!r} at the target: {error.strerror}; directories are not "
                    "made, nor links followed"
                ) from None
            finally:
                os.close(fd)
            fd = inner
        return fd


def _check_final(directory_fd: int, name: str, dst: str, force: bool) -> None:
    try:
        status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        raise FileRefused(f"{_shown(dst)} is a directory at the target; add a slash to store into it")
    if not force:
        raise FileRefused(_taken(dst))


def _taken(dst: str) -> str:
    return f"{_shown(dst)} exists at the target; push with --force to replace it"


class PartFile:
    """A file being received. Ends with exactly one of commit() and discard(); discard() after either does nothing.

    It has no name before commit(), so that nothing is left over however we end; on file systems that cannot do that, it
    has a hidden name of ours.
    """

    def __init__(self, directory_fd: int, name: str, dst: str, force: bool) -> None:
        """Takes over directory_fd."""
        self._directory_fd = directory_fd
        self._name = name
        self._dst = dst
        self._force = force
        self._part = f".{secrets.token_hex(8)}{_PART_SUFFIX}"
        self._is_named = False
        try:
            self._fd = self._open_file()
        except OSError as error:
            raise FileRefused(f"{_shown(self._dst)}: cannot write there: {error.strerror}") from None
        self._is_open = True

    def _open_file(self) -> int:
        if Path("/proc/self/fd").exists():  # by which _link() names it
            try:
                return os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=self._directory_fd)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._part, flags, 0o600, dir_fd=self._directory_fd)
        self._is_named = True
        return fd

    def append(self, data: memoryview) -> None:
        """Write all of it. FileRefused when the disk is full or the like."""
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError as error:
                raise FileRefused(f"{_shown(self._dst)}: cannot write at the target: {error.strerror}") from None

    def commit(self, mode: int) -> None:
        """Give the file its name, at once and whole. FileRefused when another took it meanwhile and force is off."""
        try:
            os.close(os.dup(self._fd))  # NFS and its like tell at a close, of any descriptor, what they could not write
            os.fchmod(self._fd, mode & 0o777 & ~_umask())
            self._rename()
        except FileExistsError:  # since the offer: of another push, say
            raise FileRefused(_taken(self._dst)) from None
        except OSError as error:
            raise FileRefused(f"{_shown(self._dst)}: cannot be given its name: {error.strerror}") from None
        finally:
            self.discard()

    def _rename(self) -> None:
        if self._force:
            if not self._is_named:
                self._is_named = True  # first, so that whatever interrupts us leaves no name behind
                self._link(self._part)
            self._replace()
            return
        try:
            # Unlike a rename this fails when the name is taken, and does not replace.
            self._link(self._name)
        except FileExistsError:
            raise
        except OSError:
            if not self._is_named:
                raise
            # No hard links here. A file that appears between the look and the rename would be replaced.
            _check_final(self._directory_fd, self._name, self._dst, force=False)
            self._replace()

    def _link(self, name: str) -> None:
        """Gives the open file one more name. A file without any is linked through its link in /proc."""
        os.link(f"/proc/self/fd/{self._fd}", name, dst_dir_fd=self._directory_fd, follow_symlinks=True)

    def _replace(self) -> None:
        fd = self._directory_fd
        os.replace(self._part, self._name, src_dir_fd=fd, dst_dir_fd=fd)
        self._is_named = False

    def discard(self) -> None:
        """Removes what there is of it. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if self._is_named:
            with contextlib.suppress(OSError):
                os.unlink(self._part, dir_fd=self._directory_fd)
        with contextlib.suppress(OSError):  # of writes: commit() has asked, or nobody wants them
            os.close(self._fd)
        os.close(self._directory_fd)


def _shown(dst: str) -> str:
    """A name for messages: quoted, and cut if it is long."""
    return repr(dst if len(dst) <= _SHOWN_MAX else dst[:_SHOWN_MAX] + "...")


def _umask() -> int:
    """The process's mask; Linux can only be asked by setting it, except through /proc. Without /proc: the strictest."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077
