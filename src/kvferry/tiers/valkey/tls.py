"""TLS towards the servers (``kvferry.certificates``), and what its errors mean.

There is no setting that lowers this, and nothing falls back to a plain connection.
"""

import socket
import ssl

from kvferry.addresses import Address
from kvferry.certificates import Contexts, Labels, client_context
from kvferry.errors import MisconfiguredError
from kvferry.values import TlsFiles

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


class Tls:
    """For the connections to one deployment's servers; usable by every thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises MisconfiguredError if a file cannot be used."""
        self.files = files
        self._contexts = Contexts(lambda: client_context(files, Labels()), files)

    def wrap(self, sock: socket.socket, address: Address) -> ssl.SSLSocket:
        """Shake hands on a connected socket, which is closed if that fails.

        Raises MisconfiguredError when one side refuses the other, else OSError.
        """
        try:
            return self._contexts().wrap_socket(sock, server_hostname=address.host)
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
