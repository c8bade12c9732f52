"""TLS between nodes and keepers, and what its errors mean."""

import ssl

from kvferry.certificates import Contexts, Labels, client_context, server_context
from kvferry.tiers.valkey.url import Address
from kvferry.values import TlsFiles

NODE_LABELS = Labels("keeper_tls_ca ", "keeper_tls_cert ", "keeper_tls_key ")
KEEPER_LABELS = Labels("tls_ca ", "tls_cert ", "tls_key ")

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


def node_contexts(files: TlsFiles) -> Contexts:
    """For connections to keepers. Raises MisconfiguredError where a file cannot be used."""
    return Contexts(lambda: client_context(files, NODE_LABELS), files)


def keeper_contexts(files: TlsFiles) -> Contexts:
    """For connections of nodes; with ``ca`` they must show a certificate. Raises MisconfiguredError."""
    return Contexts(lambda: server_context(files, KEEPER_LABELS), files)


def speaks_plainly(error: OSError) -> bool:
    """Whether the other side's first bytes were none of TLS."""
    return (getattr(error, "reason", None) or "") in _NOT_TLS


def explained(error: OSError, address: Address) -> str:
    """Why there is no connection to a keeper, in one line that says what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _UNSIGNED:
            return (
                f"{address}: the keeper's certificate is not of an authority that keeper_tls_ca holds; "
                "give it the file of the one that issued it"
            )
        if error.verify_code in _WRONG_NAME:
            return (
                f"{address}: the keeper's certificate is for another host ({error.verify_message}): use a "
                "name that it holds, or issue it for this one"
            )
        return f"{address}: the keeper's certificate is refused: {error.verify_message}"
    reason = getattr(error, "reason", None) or ""
    if reason in _WANTS_CERTIFICATE:
        return f"{address}: the keeper wants a certificate: give keeper_tls_cert and keeper_tls_key"
    if reason in _REFUSES_CERTIFICATE:
        return f"{address}: the keeper refuses this node's certificate ({reason.lower().replace('_', ' ')})"
    if speaks_plainly(error):
        return f"{address}: speaks no TLS there: start the keeper with --tls-cert, or leave keeper_tls_ca out"
    if isinstance(error, ssl.SSLError):
        return f"{address}: no TLS: {reason or error}"
    return f"{address}: the connection is lost: {error.strerror or error}"
