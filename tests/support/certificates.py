"""Certificates for tests: an authority, and what it signs, as PEM files in a folder."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from baton.tls import CertificateFiles

LOCAL_NAMES = ("baton", "localhost", "127.0.0.1")
"""Names of a member's certificate that its clients accept, too."""
_DAYS = datetime.timedelta(days=2)


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs certificates."""

    folder: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @staticmethod
    def make(folder: Path, name: str = "authority") -> Authority:
        """Makes one, whose certificate is in a file of the folder."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = Authority(folder, _signed(name, key, _name(name), key), key)
        _replace(folder / f"{name}.pem", _pem(made.certificate))
        return made

    @property
    def path(self) -> str:
        """The file of its certificate."""
        return str(self.folder / f"{_common_name(self.certificate)}.pem")

    def sign(self, name: str, sans: Sequence[str] = LOCAL_NAMES) -> CertificateFiles:
        """Writes a certificate and its key to files named so, or over them, each at once."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(name, key, self.certificate.subject, self.key, sans)
        files = CertificateFiles(
            certificate=str(self.folder / f"{name}.crt"),
            key=str(self.folder / f"{name}.key"),
            authorities=(self.path,),
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _replace(Path(files.certificate), _pem(certificate))
        _replace(Path(files.key), private)
        return files


def member_files(folder: Path, name: str = "member") -> CertificateFiles:
    """What an authority of that folder has signed for that name."""
    return CertificateFiles(
        certificate=str(folder / f"{name}.crt"),
        key=str(folder / f"{name}.key"),
        authorities=(str(folder / "authority.pem"),),
    )


def cluster_settings(files: CertificateFiles) -> dict[str, Any]:
    """The settings of section `cluster` that name these files."""
    return {"tls_certificate": files.certificate, "tls_key": files.key, "tls_ca": files.authorities[0]}


def copy(source: str, target: str) -> None:
    """Has the file `target` hold what `source` holds."""
    _replace(Path(target), Path(source).read_bytes())


def serial_of(path: str) -> int:
    """The serial number of the certificate in a file."""
    return x509.load_pem_x509_certificate(Path(path).read_bytes()).serial_number


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    sans: Sequence[str] = (),
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder(
            subject_name=_name(name),
            issuer_name=issuer,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - _DAYS,
            not_valid_after=now + _DAYS,
        )
        .add_extension(x509.BasicConstraints(ca=key is issuer_key, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if sans:
        builder = builder.add_extension(x509.SubjectAlternativeName([_san(each) for each in sans]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _san(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    beside.replace(path)
