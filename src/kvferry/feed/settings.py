"""Where a node publishes its feed, and who may follow it: settings of a node (``kvferry.sources``)."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.addresses import Address, parse_listening
from kvferry.certificates import Labels
from kvferry.errors import MisconfiguredError
from kvferry.secret import Secret, parse_secret
from kvferry.sources import Setting
from kvferry.values import TlsFiles, parse_path, parse_text

DEFAULT_PORT = 9474
LABELS = Labels("feed_tls_ca ", "feed_tls_cert ", "feed_tls_key ")


def parse_feed_listen(text: object) -> Address:
    """``ADDRESS[:PORT]``, an IP address of this host; port 0 takes any. Raises MisconfiguredError."""
    return parse_listening(parse_text(text), port=DEFAULT_PORT)


FEED_SETTINGS = (
    Setting("feed_listen", parse_feed_listen, "ADDRESS", "where routers find the feed", "feed_listen"),
    Setting("feed_token", parse_secret, "TEXT", "the token itself", "feed_token", environment_only=True),
    Setting("feed_token_file", parse_path, "PATH", "file with a token that routers must show", "feed_token"),
    Setting("feed_tls_cert", parse_path, "PATH", "the feed's certificate: talk TLS", "feed_tls_cert"),
    Setting("feed_tls_key", parse_path, "PATH", "the certificate's key", "feed_tls_key"),
    Setting(
        "feed_tls_ca", parse_path, "PATH", "authority of certificates that routers must show", "feed_tls_ca"
    ),
)
"""Of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSettings:
    """listen: where routers find it. token: what they must show. tls: its certificate and key, and with
    ``ca`` the authority of routers' certificates, which they must show."""

    listen: Address
    token: Secret | None = None
    tls: TlsFiles | None = None

    @classmethod
    def of(
        cls,
        listen: Address | None,
        token: Secret | None,
        ca: Path | None,
        cert: Path | None,
        key: Path | None,
    ) -> "FeedSettings | None":
        """None: the node publishes nothing. Files as ``check_feed`` found them good."""
        if listen is None:
            return None
        files = [None if path is None else str(path) for path in (ca, cert, key)]
        return cls(listen=listen, token=token, tls=None if cert is None else TlsFiles(*files))


def check_feed(values: Mapping[str, object]) -> None:
    """Raises MisconfiguredError for what does not belong together, and for a feed that is open to all."""
    listen = values.get("feed_listen")
    if not isinstance(listen, Address):
        if lone := [name for name in values if name.startswith("feed_")]:
            raise MisconfiguredError(f"{lone[0]} is set, but no feed_listen; set it with --feed-listen")
        return
    if ("feed_tls_cert" in values) != ("feed_tls_key" in values):
        raise MisconfiguredError("feed_tls_cert and feed_tls_key belong together; set both or neither")
    if "feed_tls_ca" in values and "feed_tls_cert" not in values:
        raise MisconfiguredError(
            "feed_tls_ca is set, but no feed_tls_cert; who asks for certificates has one"
        )
    secured = "feed_token" in values or "feed_tls_ca" in values
    if not secured and not ipaddress.ip_address(listen.host).is_loopback:
        raise MisconfiguredError(
            f"everyone who reaches {listen} could follow what is asked here; set --feed-token-file, or "
            "--feed-tls-cert, --feed-tls-key and --feed-tls-ca, or listen on loopback"
        )
