"""TLS towards the servers: contexts that verify them, from files that may be replaced meanwhile.

There is no setting that lowers this: TLS 1.2 or later with Python's default ciphers, the server's
certificate and its name are verified, and nothing falls back to a plain connection.
"""

import logging
import os
import socket
import ssl
import stat
import threading
from typing import NoReturn

from kvferry.errors import MisconfiguredError
from kvferry.identity.regular import open_regular
from kvferry.tiers.valkey.url import Address, TlsFiles

_log = logging.getLogger(__name__)

# X509_V_ERR_* of OpenSSL, and what to do.
_UNSIGNED = (2, 18, 19, 20, 21)
_WRONG_NAME = (62, 64)
_SERVER_REFUSED = {
    9: "is not valid yet: is the clock right, there and here?",
    10: "has expired: it must be renewed there",
    23: "is revoked: it must be replaced there",
}
# Reasons of ssl.SSLError: the server's alerts, and what comes of talking to something else.
_CLIENT_REFUSED = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "was given none",
    "SSLV3_ALERT_NO_CERTIFICATE": "was given none",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "says that the one given has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "says that the one given is revoked",
    "TLSV1_ALERT_UNKNOWN_CA": "does not know the authority of the one given",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refuses the one given",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "refuses the one given",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "refuses the one given",
    "TLSV1_ALERT_ACCESS_DENIED": "refuses the one given",
}
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
_TOO_OLD = ("TLSV1_ALERT_PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE")

Signature = tuple[tuple[int, int, int], ...]


class Tls:
    """For the connections to one deployment's servers; usable by every thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises MisconfiguredError if a file cannot be used."""
        self.files = files
        self._lock = threading.Lock()
        self._signature = _signature(files)
        self._context = _context(files)
        self._complaint = ""

    def wrap(self, sock: socket.socket, address: Address) -> ssl.SSLSocket:
        """Shake hands on a connected socket, which is closed if that fails.

        Raises MisconfiguredError when one side refuses the other, else OSError.
        """
        try:
            return self._current().wrap_socket(sock, server_hostname=address.host)
        except ssl.SSLCertVerificationError as error:
            sock.close()
            raise MisconfiguredError(self._server_refused(error, address)) from error
        except ssl.SSLError as error:
            sock.close()
            complaint = self.client_refused(error, address)
            if complaint:
                raise MisconfiguredError(complaint) from error
            raise
        except TimeoutError:
            sock.close()
            raise
        except (OSError, ValueError) as error:
            sock.close()
            raise OSError(str(error) or type(error).__name__) from error

    def client_refused(self, error: ssl.SSLError, address: Address) -> str:
        """What the server's alert means, in one line that says what to do; empty if it is none of ours.

        With TLS 1.3 an alert about the client's certificate comes after the handshake.
        """
        reason = error.reason or ""
        if reason in _CLIENT_REFUSED:
            given = f"cert= is {self.files.cert}" if self.files.cert else "give cert=FILE and key=FILE"
            return f"{address}: the server wants a client certificate and {_CLIENT_REFUSED[reason]}: {given}"
        if reason in _NOT_TLS:
            return (
                f"{address}: does not speak TLS on this port: give its TLS port, or use the scheme valkey://"
            )
        if reason in _TOO_OLD:
            return f"{address}: the server speaks no TLS 1.2 or later: it must be upgraded"
        if reason == "SSLV3_ALERT_HANDSHAKE_FAILURE":
            return (
                f"{address}: the server breaks off the handshake: does it want a client certificate "
                "(cert=FILE and key=FILE), or other ciphers?"
            )
        return ""

    def _server_refused(self, error: ssl.SSLCertVerificationError, address: Address) -> str:
        what = f"{address}: the server's certificate"
        if error.verify_code in _UNSIGNED:
            ca = f"{self.files.ca} (ca=)" if self.files.ca else "this system"
            return f"{what} is not of an authority that {ca} knows: give that authority as ?ca=FILE"
        if error.verify_code in _WRONG_NAME:
            return (
                f"{what} is for another host ({error.verify_message}): use a name that it holds in the URL, "
                "or issue it for this one"
            )
        why = _SERVER_REFUSED.get(error.verify_code, f"is refused: {error.verify_message}")
        return f"{what} {why}"

    def _current(self) -> ssl.SSLContext:
        """The context, made anew when the files were replaced.

        Files that cannot be used (a certificate without its key yet) leave the one before in use.
        """
        with self._lock:
            signature = _signature(self.files)
            if signature == self._signature:
                return self._context
            try:
                self._context = _context(self.files)
            except MisconfiguredError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    _log.warning("%s; the files read before stay in use", error)
                return self._context
            self._signature = signature
            self._complaint = ""
            _log.info("TLS files were replaced and are in use: %s", ", ".join(_names(self.files)))
            return self._context


def _names(files: TlsFiles) -> list[str]:
    return [name for name in (files.ca, files.cert, files.key) if name is not None]


def _signature(files: TlsFiles) -> Signature:
    """Changes when a file does: also when a link, as Kubernetes makes them, leads to another one."""
    found = []
    for name in _names(files):
        try:
            state = os.stat(name)
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(found)


def _context(files: TlsFiles) -> ssl.SSLContext:
    for parameter, name in (("ca", files.ca), ("cert", files.cert), ("key", files.key)):
        if name is not None:
            _readable(parameter, name)
    try:
        context = ssl.create_default_context(cafile=files.ca)
    except (OSError, ssl.SSLError) as error:
        raise MisconfiguredError(f"ca={files.ca} holds no certificate in PEM: {_words(error)}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.cert is not None:
        try:
            context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
        except (OSError, ssl.SSLError) as error:
            raise MisconfiguredError(_useless(files, error)) from error
    return context


def _readable(parameter: str, name: str) -> None:
    try:
        with open_regular(name) as file:
            mode = os.fstat(file.fileno()).st_mode
            file.read(1)
    except OSError as error:
        raise MisconfiguredError(
            f"cannot read {parameter}={name}: {error.strerror}: give a file that user {os.geteuid()} can read"
        ) from error
    if parameter == "key" and mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise MisconfiguredError(f"key={name} is open to others: chmod 600 {name}")


def _useless(files: TlsFiles, error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"key={files.key} is not the key of cert={files.cert}: give the two that belong together"
    return (
        f"cert={files.cert} and key={files.key} cannot be used: {_words(error)}: give a certificate, with "
        "its chain, and its key, both in PEM"
    )


def _words(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error.strerror or error).lower().replace("_", " ")


def _no_passphrase() -> NoReturn:
    """OpenSSL would ask at the terminal."""
    raise MisconfiguredError("key= is encrypted: give one without a passphrase, readable by this user alone")
