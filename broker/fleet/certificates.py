"""X.509 of one fleet: an authority of its own, and the certificates by which its brokers and clients know each other.

Keys are ECDSA P-256, because a handshake with them costs a Pi a fraction of one with RSA. A credential is one PEM
text, private key first, then the certificate: whoever replaces it replaces both.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from broker.contract import errors

NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
"""The date from which every certificate is good. A Pi without a clock starts at the date of its image, and may not
refuse one as too new."""
AUTHORITY_DAYS = 20 * 365
ACTOR_DAYS = 10 * 365
"""The time for which an actor's certificate is good: long, because a robot must not stop at night over a date. An
actor's end is `revoke`, which needs none."""
RENEWED_DAYS = 2 * 365
"""The time for which those of the broker and the learner are good, who renew their own when a third is left."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class Authority:
    """Signs the certificates of one fleet, and of no other.

    Args:
        pem: Its private key and certificate.

    Raises:
        IdentityError: They cannot be read.
    """

    def __init__(self, pem: bytes) -> None:
        self._key = _key(pem)
        self._certificate = _certificate(pem)

    @classmethod
    def create(cls, fleet: str) -> bytes:
        """Returns the PEM of a new authority, which may sign for clients and brokers but for no further authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(fleet, "authority")
        usage = _usage(digital_signature=False, key_cert_sign=True)
        builder = _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        return _pem(key, builder.sign(key, hashes.SHA256()))

    @property
    def certificate(self) -> bytes:
        """The PEM of what others need to check those it signed."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def client(self, fleet: str, name: str, days: int) -> bytes:
        """Returns the credential of a client. It cannot serve: no client of ours takes it for a broker's."""
        return self._issue(_name(fleet, name), ExtendedKeyUsageOID.CLIENT_AUTH, days, [])

    def broker(self, fleet: str, hosts: Iterable[str]) -> bytes:
        """Returns the credential of the fleet's brokers.

        Args:
            fleet: Name of the fleet.
            hosts: Names and addresses under which clients know them.

        Raises:
            ConfigError: A name cannot be part of a certificate.
        """
        names = [_general_name(host) for host in hosts]
        return self._issue(_name(fleet, "broker"), ExtendedKeyUsageOID.SERVER_AUTH, RENEWED_DAYS, names)

    def _issue(
        self, name: x509.Name, purpose: x509.ObjectIdentifier, days: int, hosts: list[x509.GeneralName]
    ) -> bytes:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._certificate
        builder = _builder(name, issuer.subject, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(digital_signature=True, key_cert_sign=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        known = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(known, critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        return _pem(key, builder.sign(self._key, hashes.SHA256()))


def covers(pem: bytes, hosts: Iterable[str]) -> bool:
    """Returns whether a broker's certificate is good for all these names and addresses."""
    names = _certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return set(names).issuperset(map(_general_name, hosts))


def ends_soon(pem: bytes) -> bool:
    """Returns whether less than a third of `RENEWED_DAYS` is left."""
    left = _certificate(pem).not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return left < datetime.timedelta(days=RENEWED_DAYS / 3)


def signed_by(pem: bytes, authority: bytes) -> bool:
    """Returns whether a certificate is one of this authority's."""
    try:
        _certificate(pem).verify_directly_issued_by(_certificate(authority))
    except Exception:  # whatever is wrong with it, it is not
        return False
    return True


def _builder(name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    builder = x509.CertificateBuilder().issuer_name(issuer).subject_name(name).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(NOT_BEFORE).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _name(fleet: str, name: str) -> x509.Name:
    attributes = ((NameOID.ORGANIZATION_NAME, f"actorq {fleet}"[:64]), (NameOID.COMMON_NAME, name))
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in attributes])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise errors.ConfigError(f"{host!r} is neither a host name nor an address") from None


def _usage(*, digital_signature: bool, key_cert_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> bytes:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise errors.IdentityError(f"the key of the fleet's authority cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise errors.IdentityError("the key of the fleet's authority is not an ECDSA key")
    return key


def _certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise errors.IdentityError(f"a certificate cannot be read: {error}") from error
