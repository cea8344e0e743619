"""TLS for every port: one certificate and key, looked at before anything is listened on."""

from __future__ import annotations

import ssl
from pathlib import Path

from kvtools.errors import BadInputError
from kvtools.server.settings import Settings


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
