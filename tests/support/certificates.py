"""Certificates for tests: authorities, and what they issue. Keys are on P-256, which is quick to make."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

import crossrail as xr

_DAY = datetime.timedelta(days=1)


class Authority:
    """A CA whose files are in `folder`: its own certificate, and for each name that it has issued a pair of files."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._builder(self._subject, self._key.public_key(), age=_DAY, left=30 * _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(
        self,
        name: str = "engine",
        *,
        dns: Sequence[str] = (),
        left: datetime.timedelta = 30 * _DAY,
        password: bytes | None = None,
        trusts: Path | None = None,
        verify: str = "chain",
    ) -> xr.TlsConfig:
        """A certificate and its key. left: of its life; negative: it has expired. trusts: another CA than this one."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key(), age=10 * _DAY, left=left)
        if dns:
            names = x509.SubjectAlternativeName([x509.DNSName(one) for one in dns])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        cert_file, key_file = (self.folder / f"{self._name}-{name}.{kind}.pem" for kind in ("cert", "key"))
        cert_file.write_bytes(certificate.public_bytes(Encoding.PEM))
        encryption: KeySerializationEncryption = BestAvailableEncryption(password) if password else NoEncryption()
        key_file.touch(mode=0o600)
        key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        return xr.TlsConfig(cert_file, key_file, trusts or self.file, verify)  # type: ignore[arg-type]

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        age: datetime.timedelta,
        left: datetime.timedelta,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - age)
            .not_valid_after(now + left)
        )
