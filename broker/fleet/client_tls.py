"""TLS of a client of a fleet, by certificates that are there already.

Apart from `certificates`, which makes and reads them: an actor has no need of that, nor of the megabyte that it takes.
"""

from __future__ import annotations

import ssl

from broker.contract import errors
from broker.program import storage


def client_context(authority: bytes, credential: bytes) -> ssl.SSLContext:
    """Returns the TLS settings of a client: it trusts this fleet alone, checks the host, and shows its certificate.

    Args:
        authority: PEM of the authority's certificate.
        credential: PEM of the client's key and certificate.

    Raises:
        IdentityError: They cannot be used.
        StorageError: The temporary file that this takes cannot be written.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(cadata=authority.decode())
        with storage.scratch() as (file, path):  # 0600, or ours alone; the ssl module reads keys from files alone
            file.write(credential)
            file.flush()
            context.load_cert_chain(path)
    except (ssl.SSLError, ValueError) as error:
        raise errors.IdentityError(f"the TLS certificate cannot be used: {error}", todo="enrol again") from error
    except OSError as error:  # a full disk says nothing about the certificate
        if storage.of_disk(error):
            raise storage.explained(error) from error
        raise errors.ActorqError(f"the TLS certificate cannot be handed to OpenSSL: {error}") from error
    return context
