"""TLS for every port: one certificate and key, looked at before anything is listened on."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from kvtools.errors import BadInputError
from kvtools.server.settings import Settings

_NOT_OF_TODAY = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Return what encrypts the connections of a server; None where it has no certificate.

    Raises `BadInputError` if there is a certificate without a key, or the files are none that belong together.
    """
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise BadInputError("setting up TLS: --tls-cert and --tls-key belong together, and one of them is not there")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, settings.tls_cert, settings.tls_key)
    return context


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Have `context` use these files from the next connection on; raises `BadInputError`, and changes nothing then."""
    for path in (certificate, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise BadInputError(f"setting up TLS: reading '{path}': {error.strerror or error}") from error

    def no_passphrase() -> str:
        raise BadInputError(f"setting up TLS: the key in '{key}' has a passphrase, which nobody is here to type")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, no_passphrase)
        context.load_cert_chain(certificate, key, no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise BadInputError(
            f"setting up TLS: '{certificate}' and '{key}' are no certificate (PEM) and the key to it:"
            f" {getattr(error, 'reason', None) or error}"
        ) from error


def not_of_today(certificate: Path, key: Path) -> str:
    """Return a sentence about a certificate that clients refuse by its dates, "" of any other.

    It is shown to a client that trusts it, in memory: whatever else clients may hold against it is not asked.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(certificate, key)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks, answers = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    try:
        for side in (asks, answers, asks):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _NOT_OF_TODAY:
            return f"clients refuse the certificate in '{certificate}': {error.verify_message}"
    except ssl.SSLError:  # of something else
        pass
    return ""
