"""Answers of the router itself, as an OpenAI server words errors."""

import msgspec

from kvferry.errors import RefusedError


class TurnedAwayError(RefusedError):
    """The router answers it itself. status: of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    417: "Expectation Failed",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    502: "bad_gateway",
    503: "service_unavailable",
    504: "timeout",
}


def error_document(status: int, message: str) -> bytes:
    """As OpenAI's API has it, and with the word that Anthropic's wants beside it."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": None, "code": status}
    return msgspec.json.encode({"type": "error", "error": error})


def refusal(
    status: int,
    message: str,
    *,
    request_id: bytes = b"",
    retry_after_s: int | None = None,
    close: bool = False,
) -> bytes:
    """The whole answer."""
    document = error_document(status, message)
    return own_answer(status, document, request_id=request_id, retry_after_s=retry_after_s, close=close)


def own_answer(
    status: int,
    body: bytes,
    *,
    request_id: bytes = b"",
    retry_after_s: int | None = None,
    close: bool = False,
) -> bytes:
    """A whole answer with this JSON document."""
    lines = [
        f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if request_id:
        lines.append(f"X-Request-Id: {request_id.decode('latin-1')}")
    if retry_after_s is not None:
        lines.append(f"Retry-After: {retry_after_s}")
    if status == 401:
        lines.append("WWW-Authenticate: Bearer")
    if close:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def broken_stream(message: str) -> bytes:
    """The event that ends a stream which cannot go on. The empty lines end whatever was cut off."""
    return b"\n\nevent: error\ndata: " + error_document(502, message) + b"\n\n"


def as_chunk(data: bytes) -> bytes:
    """Of ``Transfer-Encoding: chunked``."""
    return b"%x\r\n" % len(data) + data + b"\r\n"
