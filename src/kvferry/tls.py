"""TLS between processes of a fleet, and what its errors mean."""

import ssl
from typing import NamedTuple

from kvferry.addresses import Address
from kvferry.certificates import Contexts, Labels, client_context, server_context
from kvferry.values import TlsFiles


class Ends(NamedTuple):
    """Who connects to whom, for people. settings: how those of who connects begin. flag: by which the other
    talks TLS."""

    client: str
    server: str
    settings: str
    flag: str = "--tls-cert"

    @property
    def ca(self) -> str:
        """The setting that names the authority."""
        return f"{self.settings}ca"

    @property
    def labels(self) -> Labels:
        """Of the files of who connects."""
        return Labels(*(f"{self.settings}{name} " for name in ("ca", "cert", "key")))


# X509_V_ERR_* of OpenSSL.
_UNSIGNED = (2, 7, 18, 19, 20, 21)
_WRONG_NAME = (62, 64)
_WANTS_CERTIFICATE = ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_NO_CERTIFICATE")
_REFUSES_CERTIFICATE = (
    "SSLV3_ALERT_CERTIFICATE_EXPIRED",
    "SSLV3_ALERT_CERTIFICATE_REVOKED",
    "TLSV1_ALERT_UNKNOWN_CA",
    "SSLV3_ALERT_BAD_CERTIFICATE",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    "TLSV1_ALERT_ACCESS_DENIED",
    "TLSV1_ALERT_DECRYPT_ERROR",
)
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")


def client_contexts(files: TlsFiles, labels: Labels) -> Contexts:
    """For connections to a server, which is verified. Raises MisconfiguredError for a useless file."""
    return Contexts(lambda: client_context(files, labels), files)


def server_contexts(files: TlsFiles, labels: Labels) -> Contexts:
    """For who connects; with ``ca`` they must show a certificate. Raises MisconfiguredError."""
    return Contexts(lambda: server_context(files, labels), files)


def speaks_plainly(error: OSError) -> bool:
    """Whether the other side's first bytes were none of TLS."""
    return (getattr(error, "reason", None) or "") in _NOT_TLS


def explained(error: OSError, address: Address, ends: Ends) -> str:
    """Why there is no connection to the server, in one line that says what to do."""
    server = ends.server
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _UNSIGNED:
            return (
                f"{address}: the {server}'s certificate is not of an authority that {ends.ca} holds; "
                "give it the file of the one that issued it"
            )
        if error.verify_code in _WRONG_NAME:
            return (
                f"{address}: the {server}'s certificate is for another host ({error.verify_message}): use a "
                "name that it holds, or issue it for this one"
            )
        return f"{address}: the {server}'s certificate is refused: {error.verify_message}"
    reason = getattr(error, "reason", None) or ""
    if reason in _WANTS_CERTIFICATE:
        return f"{address}: the {server} wants a certificate: give {ends.settings}cert and {ends.settings}key"
    if reason in _REFUSES_CERTIFICATE:
        why = reason.lower().replace("_", " ")
        return f"{address}: the {server} refuses this {ends.client}'s certificate ({why})"
    if speaks_plainly(error):
        return f"{address}: speaks no TLS there: start the {server} with {ends.flag}, or leave {ends.ca} out"
    if isinstance(error, ssl.SSLError):
        return f"{address}: no TLS: {reason or error}"
    return f"{address}: the connection is lost: {error.strerror or error}"
