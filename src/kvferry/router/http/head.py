"""Heads of messages: read strictly (llhttp), and written anew without what concerns one hop alone."""

import re
from collections.abc import Iterable

import httptools

from kvferry.errors import CorruptError
from kvferry.router.http.framing import Body, Chunked, Sized, UntilClosed
from kvferry.router.http.refusals import TurnedAwayError

MAX_HEAD_BYTES = 64 << 10
MAX_FIELDS = 256
REQUEST_ID = b"X-Request-Id"

Fields = list[tuple[bytes, bytes]]

# RFC 9110, section 7.6.1, and what was in use before it.
_ONE_HOP = frozenset(
    b"connection keep-alive proxy-connection te upgrade proxy-authenticate proxy-authorization".split()
)
_READ_HERE = frozenset(
    b"connection content-length transfer-encoding host expect upgrade x-request-id".split()
)
_SAID_HERE = frozenset((b"upgrade", b"close", b"keep-alive"))
_FRAMING = frozenset((b"content-length", b"transfer-encoding"))
_TARGET = re.compile(rb"/[!-\"$-~\x80-\xff]*")  # no fragment: who sees a path there, and who does not?
_LENGTH = re.compile(rb"[0-9]{1,15}")
_BEGIN = b"HTTP/1."
_ANSWER = re.compile(rb"HTTP/1\.[01] [1-5][0-9][0-9][ \r]")


class BadHeadError(TurnedAwayError):
    """A request that is none."""


class RequestHead:
    """Of one request. length: of its body; None: chunked."""

    __slots__ = (
        "chunked", "close", "expects", "fields", "length", "method", "old", "request_id", "target", "upgrade",
    )  # fmt: skip

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.fields: Fields = []
        self.length = 0
        self.chunked = False
        self.close = False  # the client wants no further request on this connection
        self.old = False  # HTTP/1.0
        self.expects = False  # 100 Continue
        self.upgrade = b""  # to what
        self.request_id = b""

    @property
    def path(self) -> bytes:
        """Without the query."""
        return self.target.partition(b"?")[0]

    def field(self, name: bytes) -> bytes | None:
        """The first field of that name, which is in small letters."""
        return next((value for key, value in self.fields if key.lower() == name), None)

    def body(self) -> Body:
        """What follows it."""
        return Chunked() if self.chunked else Sized(self.length)


class AnswerHead:
    """Of one answer. fields: without those of one hop."""

    __slots__ = ("chunked", "close", "fields", "length", "reason", "sse", "status", "upgrade")

    def __init__(self) -> None:
        self.status = 0
        self.reason = b""
        self.fields: Fields = []
        self.length = -1  # not said
        self.chunked = False
        self.close = False
        self.sse = False
        self.upgrade = b""  # to what, in small letters: of 101

    def body(self, method: bytes) -> Body:
        """What follows it as the answer to that method."""
        if method == b"HEAD" or self.status < 200 or self.status in (204, 304):
            return Sized(0)
        if self.chunked:
            return Chunked()
        return Sized(self.length) if self.length >= 0 else UntilClosed()


class _Read:
    """What llhttp found."""

    __slots__ = ("begun", "fields", "heads", "reason", "url")

    def __init__(self) -> None:
        self.url = b""
        self.reason = b""
        self.fields: Fields = []
        self.begun = 0
        self.heads = 0

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_status(self, status: bytes) -> None:
        self.reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.fields) == MAX_FIELDS:
            raise BadHeadError(431, f"more than {MAX_FIELDS} header fields")
        self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        self.heads += 1

    def on_message_complete(self) -> None: ...

    def on_body(self, body: bytes) -> None:
        raise BadHeadError(400, "a body begins before its head has ended")


def read_request(data: bytes) -> RequestHead:
    """data: from the first line to the empty one. Raises BadHeadError."""
    read = _Read()
    parser = httptools.HttpRequestParser(read)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade as upgrade:
        if upgrade.args[0] != len(data):
            raise BadHeadError(400, "the head does not end where it should") from upgrade
    except httptools.HttpParserError as error:
        if isinstance(error.__context__, BadHeadError):
            raise error.__context__ from None
        raise BadHeadError(400, f"no HTTP/1.1 request: {error}") from error
    if (read.begun, read.heads) != (1, 1):
        raise BadHeadError(400, "the head does not end where it should")
    head = RequestHead()
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise BadHeadError(505, "HTTP/1.1 is spoken here")
    head.old = version == "1.0"
    head.method = parser.get_method()
    head.target = read.url
    if head.method in (b"CONNECT", b"TRACE"):
        raise BadHeadError(405, f"{head.method.decode()} is not offered")
    if not _TARGET.fullmatch(head.target) and head.target != b"*":
        raise BadHeadError(400, "the target is no path")
    _request_fields(head, read.fields)
    return head


def _request_fields(head: RequestHead, fields: Fields) -> None:
    head.close = head.old
    said: dict[bytes, list[bytes]] = {}
    for name, value in fields:
        key = name.lower()
        if key in _READ_HERE:
            said.setdefault(key, []).append(value)
        elif key not in _ONE_HOP:
            head.fields.append((name, value))
    _framing(head, said.get(b"content-length", []), said.get(b"transfer-encoding", []))
    hosts = len(said.get(b"host", []))
    if hosts != 1 and not (head.old and not hosts):
        raise BadHeadError(400, "not one Host")
    if expected := said.get(b"expect"):
        if [value.lower() for value in expected] != [b"100-continue"]:
            raise BadHeadError(417, "only 100-continue can be expected")
        head.expects = not head.old
    head.request_id = said.get(b"x-request-id", [b""])[0]
    if connection := said.get(b"connection"):
        named = _words(b",".join(connection))
        head.close = head.old or b"close" in named
        # To nothing else: over HTTP/2, say, requests would go by the router unread.
        if b"upgrade" in named and [to.lower() for to in said.get(b"upgrade", [])] == [b"websocket"]:
            head.upgrade = b"websocket"
        head.fields = [field for field in head.fields if field[0].lower() not in named]


def _framing(head: RequestHead, lengths: list[bytes], encodings: list[bytes]) -> None:
    """One way to say where the body ends, or none. Two could be read differently by two servers."""
    if lengths and encodings:
        raise BadHeadError(400, "both Content-Length and Transfer-Encoding")
    if lengths:
        if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
            raise BadHeadError(400, "Content-Length is not one number")
        head.length = int(lengths[0])
    if encodings:
        if head.old or len(encodings) > 1:
            raise BadHeadError(400, "Transfer-Encoding where there is none")
        if encodings[0].lower() != b"chunked":
            raise BadHeadError(501, "of transfer encodings only chunked is understood")
        head.chunked = True


def may_begin_answer(data: bytes) -> bool:
    """Whether it may be the first bytes of an answer."""
    return data.startswith(_BEGIN[: len(data)]) and (len(data) < 13 or _ANSWER.match(data) is not None)


def read_answer(data: bytes) -> AnswerHead:
    """data: from the first line to the empty one. Raises CorruptError."""
    if not _ANSWER.match(data):
        raise CorruptError("what came is no HTTP/1.1 answer")
    read = _Read()
    parser = httptools.HttpResponseParser(read)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise CorruptError(f"no HTTP/1.1 answer: {error}") from error
    if (read.begun, read.heads) != (1, 1):
        raise CorruptError("the head of an answer does not end where it should")
    head = AnswerHead()
    head.status = parser.get_status_code()
    head.reason = read.reason
    head.close = parser.get_http_version() != "1.1"
    named = _answer_fields(head, read.fields) - _FRAMING
    head.close = head.close or b"close" in named
    if head.status < 200 or head.status in (204, 304):  # RFC 9112, section 6.3: not everybody knows
        head.close = head.close or head.chunked or head.length > 0
        named |= _FRAMING
    named -= _SAID_HERE
    if named:
        head.fields = [field for field in head.fields if field[0].lower() not in named]
    return head


def _answer_fields(head: AnswerHead, fields: Fields) -> set[bytes]:
    """What Connection names."""
    named: set[bytes] = set()
    for name, value in fields:
        key = name.lower()
        if key == b"content-length":
            if not _LENGTH.fullmatch(value) or head.length not in (-1, int(value)):
                raise CorruptError("Content-Length is not one number")
            head.length = int(value)
        elif key == b"transfer-encoding":
            if head.chunked or value.lower() != b"chunked":
                raise CorruptError(f"a transfer encoding that is not known: {value[:40]!r}")
            head.chunked = True
        elif key == b"connection":
            named |= _words(value)
            continue
        elif key == b"content-type":
            head.sse = value.lower().startswith(b"text/event-stream")
        elif key == b"upgrade" and head.status == 101:
            head.upgrade = b"".join((head.upgrade, b", " if head.upgrade else b"", value.lower()))
        elif key in _ONE_HOP:
            continue
        head.fields.append((name, value))
    if head.chunked and head.length >= 0:
        raise CorruptError("both Content-Length and Transfer-Encoding")
    return named


def _words(value: bytes) -> set[bytes]:
    return {word.strip(b" \t").lower() for word in value.split(b",")}


def request_bytes(head: RequestHead, *, host: bytes, request_id: bytes, length: int | None) -> bytes:
    """The head for a worker. length: of the body that will follow in one piece; None: there is none."""
    version = b"1.0" if head.old else b"1.1"
    parts = [head.method, b" ", head.target, b" HTTP/", version, b"\r\nHost: ", host, b"\r\n"]
    _write(parts, head.fields)
    parts += (REQUEST_ID, b": ", request_id, b"\r\n")
    if length is not None:
        parts.append(b"Content-Length: %d\r\n" % length)
    if head.upgrade:
        parts += (b"Connection: upgrade\r\nUpgrade: ", head.upgrade, b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def answer_bytes(head: AnswerHead, *, request_id: bytes, close: bool, worker: str = "") -> bytes:
    """The head for a client. worker: the URL of whose it is: redirects to there lead to the router."""
    parts = [b"HTTP/1.1 %d " % head.status, head.reason, b"\r\n"]
    fields: Iterable[tuple[bytes, bytes]] = head.fields
    if worker and 300 <= head.status < 400:
        origin = worker.encode() + b"/"
        fields = [
            (
                name,
                value[len(origin) - 1 :]
                if name.lower() == b"location" and value.startswith(origin)
                else value,
            )
            for name, value in fields
        ]
    _write(parts, (field for field in fields if field[0].lower() != b"x-request-id"))
    parts += (REQUEST_ID, b": ", request_id, b"\r\n")
    if head.status == 101:
        parts.append(b"Connection: upgrade\r\n")
    elif close:
        parts.append(b"Connection: close\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def _write(parts: list[bytes], fields: Iterable[tuple[bytes, bytes]]) -> None:
    for name, value in fields:
        parts += (name, b": ", value, b"\r\n")
