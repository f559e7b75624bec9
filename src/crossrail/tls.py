"""TLS of the tcp transport: an engine's certificate, and the CAs it trusts."""

from __future__ import annotations

import logging
import os
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from crossrail.errors import UsageError

CERT_VARIABLE = "CROSSRAIL_TLS_CERT"
KEY_VARIABLE = "CROSSRAIL_TLS_KEY"
CA_VARIABLE = "CROSSRAIL_TLS_CA"
VERIFY_VARIABLE = "CROSSRAIL_TLS_VERIFY"

log = logging.getLogger("crossrail")

# Transports that reach other hosts, or may.
_NETWORKS = ("auto", "tcp", "verbs", "ofi")


@dataclass(frozen=True)
class TlsConfig:
    """TLS 1.3 with certificates on both sides, for everything that tcp sends: the handshake, messages, and all data.

    cert: file with this engine's certificate, and those between it and the CA. key: file with its private key, without
        a password. ca: file with the certificates of the CAs to trust. All are PEM files, read when the engine opens.
    verify: "chain": any certificate of the CA is accepted; "name": one of its DNS names must also be the name of the
        peer's engine, or a wildcard for it. A star stands for one label, and OpenSSL requires two more labels after it:
        "*.kv.lab" matches "node-1.kv.lab", and "*.lab" matches nothing.

    Needs OpenSSL 3 (libssl.so.3), which is opened at run time. Either both engines use TLS or neither: otherwise they
    refuse each other.
    """

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    verify: Literal["chain", "name"] = "chain"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> TlsConfig | None:
        """What CROSSRAIL_TLS_CERT, _KEY, _CA and _VERIFY say; None if none is set. UsageError if only some of CERT, KEY
        and CA are set.
        """
        environ = os.environ if environ is None else environ
        files = {name: environ.get(name, "") for name in (CERT_VARIABLE, KEY_VARIABLE, CA_VARIABLE)}
        missing = [name for name, path in files.items() if not path]
        if len(missing) == len(files):
            return None
        if missing:
            present = next(name for name, path in files.items() if path)
            raise UsageError(f"{present} is set and {missing[0]} is not: TLS needs a certificate, its key and a CA")
        cert, key, ca = files.values()
        verify = environ.get(VERIFY_VARIABLE) or "chain"
        return cls(cert, key, ca, verify)  # type: ignore[arg-type]  # checked when the engine opens

    def as_tuple(self) -> tuple[str, str, str, str]:
        """As the native engine takes them; it checks the values."""
        cert, key, ca = (_path(name, getattr(self, name)) for name in ("cert", "key", "ca"))
        return cert, key, ca, self.verify


def tls_of(tls: object, transport: object) -> tuple[str, str, str, str]:
    """The TLS options for the native engine. None: from the environment, for engines that reach other hosts."""
    if tls is None and isinstance(transport, str) and any(word in transport for word in _NETWORKS):
        tls = TlsConfig.from_environment()
    if tls is None:
        return "", "", "", "chain"
    if not isinstance(tls, TlsConfig):
        raise UsageError(f"tls must be a TlsConfig or None, not {type(tls).__name__}")
    files = tls.as_tuple()
    if words := exposure_of_key(files[1]):
        log.warning("%s", words)
    return files


_exposed_keys: set[str] = set()  # files already warned about, by absolute path


def exposure_of_key(key: str | os.PathLike[str]) -> str:
    """A warning about a private key file that others than its owner may read or write; "" if there is none.

    Once per file and process: a caller that has shown it to the user need not log it. Missing files are left to the
    engine, which reports them.
    """
    try:
        path = os.path.abspath(key)  # noqa: PTH100 - pathlib is slow to import
        mode = stat.S_IMODE(os.stat(path).st_mode)  # noqa: PTH116
    except OSError:
        return ""
    others = open_to(mode)
    if not others or path in _exposed_keys:
        return ""
    _exposed_keys.add(path)
    seen = f"tls.key = {str(key)!r} is open to {others} (mode {mode:04o})"
    return f"{seen}: who has it can pose as this engine; chmod 600 {shlex.quote(path)}"


def open_to(mode: int) -> str:
    """Who besides the owner may read or write a file of this mode; "" for nobody."""
    return "everybody" if mode & 0o006 else "its group" if mode & 0o060 else ""


def _path(name: str, path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"tls.{name} must be the path of a file, not {type(path).__name__}")
    text = os.fspath(path)
    try:
        if isinstance(text, str) and text.encode() and "\0" not in text:
            return text
    except UnicodeEncodeError:
        pass
    raise UsageError(f"tls.{name} = {path!r} is not the path of a file in UTF-8")
