"""Tries process_vm_readv(2) on the process of the given number and writes its errno as JSON. A child of the doctor's.

Reads from address 0, which nobody maps: EFAULT says that we were let in, EPERM that we were not.
"""

from __future__ import annotations

import ctypes
import errno
import json
import sys


class IoVec(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def main() -> None:
    """Writes one line."""
    library = ctypes.CDLL(None, use_errno=True)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    room = ctypes.create_string_buffer(1)
    ours, theirs = IoVec(ctypes.addressof(room), 1), IoVec(0, 1)
    arguments = (ctypes.byref(ours), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), ctypes.c_ulong(0))
    library.process_vm_readv(ctypes.c_int(int(sys.argv[1])), *arguments)
    code = ctypes.get_errno()
    sys.stdout.write(json.dumps({"errno": 0 if code == errno.EFAULT else code}) + "\n")


if __name__ == "__main__":
    main()
