"""What an error of obstore means, where its text tells: which of the usual mistakes it is, and what to do."""

import re

_HOST = re.compile(r"\bhttps?://([^/\s,\"]+)")
_METADATA = re.compile(r"https?://(169\.254\.\d+\.\d+|\[fd00:ec2::254\])|/latest/(api/token|meta-data)\b")
"""Where a cloud's machines ask for the credentials of their role."""
_NO_CREDENTIALS = "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this host a role"
_ENDPOINT = "check the endpoint (AWS_ENDPOINT_URL)"
_REGION = "it is in another region: set AWS_REGION"
# In this order, each with the reason; {host} is who was asked.
_REASONS = (
    (r"ConnectionRefused", f"nobody listens at {{host}}: {_ENDPOINT}"),
    (r"dns error|failed to lookup address", f"there is no host {{host}}: {_ENDPOINT}"),
    (r"HostUnreachable|NetworkUnreachable", f"{{host}} cannot be reached: {_ENDPOINT} and the network"),
    (
        r"InvalidCertificate\(\s*(UnknownIssuer|Other)",
        "the certificate of {host} is of an unknown authority: name a file that holds it in SSL_CERT_FILE",
    ),
    (
        r"InvalidCertificate\(\s*NotValidForName",
        "the certificate of {host} is for another host: use a name that it holds",
    ),
    (
        r"InvalidCertificate\(\s*(Expired|NotValidYet)",
        "the certificate of {host} is not valid today: renew it, or set this machine's clock",
    ),
    (r"InvalidCertificate", "the certificate of {host} is refused: see its chain and SSL_CERT_FILE"),
    (
        r"InvalidContentType|InvalidMessage\(|CorruptMessage",
        "{host} speaks no TLS there: write http:// in the endpoint (AWS_ENDPOINT_URL)",
    ),
    (
        r"HTTP request (was sent )?to (an )?HTTPS",
        "{host} wants TLS: write https:// in the endpoint (AWS_ENDPOINT_URL)",
    ),
    (r"<Code>(PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocation\w*)", _REGION),
    (
        r"redirect without LOCATION",
        f"what answers at {{host}} is in another region (AWS_REGION), or no S3: {_ENDPOINT}",
    ),
    (
        r"ETag Header missing|405 Method Not Allowed|Unable to parse",
        f"what answers at {{host}} is no S3: {_ENDPOINT}",
    ),
    (
        r"ConnectionReset|ConnectionAborted|IncompleteMessage",
        "{host} closed the connection: does it want TLS?",
    ),
)
_PATTERNS = tuple((re.compile(pattern), reason) for pattern, reason in _REASONS)


def lacks_credentials(text: str) -> bool:
    """Whether there were none, and this machine has no role that would give them."""
    return _METADATA.search(text) is not None


def reason(text: str) -> str:
    """One line; empty where the text of the error says nothing that is known."""
    if lacks_credentials(text):
        return _NO_CREDENTIALS
    host = _HOST.search(text)
    for pattern, words in _PATTERNS:
        if pattern.search(text):
            return words.format(host=host[1] if host is not None else "the endpoint")
    return ""
