"""TLS contexts from PEM files that may be replaced meanwhile: of those who connect, and of a server.

There is no setting that lowers this: TLS 1.2 or later with Python's default ciphers, and the other end's
certificate is verified: the server's with its name always, the client's where a server asks for one.
"""

import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from kvferry.errors import MisconfiguredError
from kvferry.identity.regular import open_regular
from kvferry.values import TlsFiles

_log = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int], ...]


class Labels(NamedTuple):
    """What the three files are called where they are set, up to their value."""

    ca: str = "ca="
    cert: str = "cert="
    key: str = "key="


class Contexts:
    """The context for the next connection, made anew when a file was replaced; usable by every thread."""

    def __init__(self, make: Callable[[], ssl.SSLContext], files: TlsFiles) -> None:
        """make: from the files. Raises MisconfiguredError if one cannot be used."""
        self._make = make
        self._files = files
        self._lock = threading.Lock()
        self._signature = _signature(files)
        self._context = make()
        self._complaint = ""

    def __call__(self) -> ssl.SSLContext:
        """Files that cannot be used (a certificate without its key yet) leave the one before in use."""
        with self._lock:
            signature = _signature(self._files)
            if signature == self._signature:
                return self._context
            try:
                self._context = self._make()
            except MisconfiguredError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    _log.warning("%s; the files read before stay in use", error)
                return self._context
            self._signature = signature
            self._complaint = ""
            _log.info("TLS files were replaced and are in use: %s", ", ".join(self._files.names))
            return self._context


def client_context(files: TlsFiles, labels: Labels) -> ssl.SSLContext:
    """For one who connects. Raises MisconfiguredError."""
    _check(files, labels)
    try:
        context = ssl.create_default_context(cafile=files.ca)
    except (OSError, ssl.SSLError) as error:
        raise MisconfiguredError(_no_certificate(files, labels, error)) from error
    _identify(context, files, labels)
    return context


def server_context(files: TlsFiles, labels: Labels) -> ssl.SSLContext:
    """For a server; with ``ca``, clients must show a certificate of it. Raises MisconfiguredError."""
    _check(files, labels)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _identify(context, files, labels)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cafile=files.ca)
        except (OSError, ssl.SSLError) as error:
            raise MisconfiguredError(_no_certificate(files, labels, error)) from error
    return context


def _identify(context: ssl.SSLContext, files: TlsFiles, labels: Labels) -> None:
    def no_passphrase() -> NoReturn:
        """OpenSSL would ask at the terminal."""
        raise MisconfiguredError(
            f"{labels.key} is encrypted: give one without a passphrase, readable by this user alone"
        )

    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.cert is not None:
        try:
            context.load_cert_chain(files.cert, files.key, password=no_passphrase)
        except (OSError, ssl.SSLError) as error:
            raise MisconfiguredError(_useless(files, labels, error)) from error


def _check(files: TlsFiles, labels: Labels) -> None:
    for label, name in zip(labels, (files.ca, files.cert, files.key), strict=True):
        if name is not None:
            _readable(label, name, private=name == files.key)


def _readable(label: str, name: str, *, private: bool) -> None:
    try:
        with open_regular(name) as file:
            mode = os.fstat(file.fileno()).st_mode
            file.read(1)
    except FileNotFoundError as error:
        raise MisconfiguredError(f"there is no file {label}{name}; name one in PEM") from error
    except OSError as error:
        raise MisconfiguredError(
            f"cannot read {label}{name}: {error.strerror}: give a file that user {os.geteuid()} can read"
        ) from error
    if private and mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise MisconfiguredError(f"{label}{name} is open to others: chmod 600 {name}")


def _no_certificate(files: TlsFiles, labels: Labels, error: OSError) -> str:
    return f"{labels.ca}{files.ca} holds no certificate in PEM: {_words(error)}"


def _useless(files: TlsFiles, labels: Labels, error: OSError) -> str:
    cert, key = f"{labels.cert}{files.cert}", f"{labels.key}{files.key}"
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"{key} is not the key of {cert}: give the two that belong together"
    return (
        f"{cert} and {key} cannot be used: {_words(error)}: give a certificate, with its chain, and its key, "
        "both in PEM"
    )


def _words(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error.strerror or error).lower().replace("_", " ")


def _signature(files: TlsFiles) -> Signature:
    """Changes when a file does: also when a link, as Kubernetes makes them, leads to another one."""
    found = []
    for name in files.names:
        try:
            state = os.stat(name)
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(found)
