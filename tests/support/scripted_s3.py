"""ScriptedS3: a small in-memory S3 server on a real socket that fails on command.

    with scripted_s3() as server:
        server.fail("part", answer(503, "SlowDown"), times=3)
        writer = S3Writer(endpoint_url=server.endpoint_url, addressing_style="path")

The operations are put, create, part, complete, abort, delete, head, get, list, pending (the list of
unfinished uploads, always empty) and remove (of several objects). It does not check signatures.
"""

import contextlib
import hashlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_PATIENCE_S = 20.0

Fault = Callable[["Handler", bytes], None]
"""Handles a request, given its body, instead of the server."""


@dataclass
class ScriptedS3:
    """The stored objects, the operations seen, and the faults to come."""

    endpoint_url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    etags: dict[bytes, str] = field(default_factory=dict)
    """ETags by content, for content whose ETag is not the MD5 of its bytes."""
    returns_checksums: bool = True
    """Whether answers repeat the checksum that came with the request."""
    head_checksum: Callable[[bytes], dict[str, str]] = field(default=lambda _: {})
    """Returns the checksum headers of HeadObject for an object's bytes."""
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    _faults: list[tuple[str, Fault, list[int]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, operation: str, fault: Fault, *, times: int = 1, after: int = 0) -> None:
        """Use `fault` for `times` requests of `operation`, after `after` successful ones."""
        self._faults.append((operation, fault, [after, times]))

    def forget_faults(self) -> None:
        """Remove all faults, so that every request succeeds from now on."""
        with self._lock:
            self._faults.clear()

    def fault_for(self, operation: str) -> Fault | None:
        with self._lock:
            self.seen.append(operation)
            for wanted, fault, left in self._faults:
                if wanted != operation or not left[1]:
                    continue
                if left[0]:
                    left[0] -= 1
                    continue
                left[1] -= 1
                return fault
        return None


class Handler(BaseHTTPRequestHandler):
    """One connection. `operation` is one of the names in the module docstring."""

    protocol_version = "HTTP/1.1"
    # Headers and body are two writes: Nagle's algorithm holds the second one back for 40 ms, until
    # the client has acknowledged the first.
    disable_nagle_algorithm = True
    server: Any
    key: str
    operation: str
    length: int
    query: dict[str, str]

    @property
    def script(self) -> ScriptedS3:
        """The script of this server."""
        found: ScriptedS3 = self.server.script
        return found

    @property
    def data(self) -> bytes:
        """The bytes of the requested object."""
        return self.script.objects[self.key]

    @property
    def stored_etag(self) -> str:
        """The ETag of the requested object."""
        return self.script.etags.get(self.data) or etag(self.data)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        self.key = parts.path.removeprefix("/bucket/")
        self.operation = _operation(self.command, self.query)
        self.length = int(self.headers.get("Content-Length", 0))
        fault = self.script.fault_for(self.operation)
        if fault is not None and getattr(fault, "unread", False):
            fault(self, b"")
            return
        body = self.rfile.read(self.length)
        (fault or getattr(Handler, f"_{self.operation}"))(self, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 -- names of http.server

    def answer(self, status: int, body: bytes = b"", /, **headers: str) -> None:
        """Send an answer. Underscores in the names of headers become dashes."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status: int, code: str) -> None:
        """Send an S3 error."""
        text = f"<Error><Code>{code}</Code><Message>scripted</Message></Error>"
        self.answer(status, b"" if self.command == "HEAD" else text.encode())

    def _put(self, body: bytes) -> None:
        self.store(body)
        self.answer(200, ETag=etag(body), **self.checksums())

    def store(self, data: bytes, tag: str = "") -> None:
        """Store `data` as the object; `tag` is its ETag if that is not the MD5 of its bytes."""
        self.script.objects[self.key] = data
        self.script.etags[data] = tag

    def checksums(self) -> dict[str, str]:
        """Return the checksum headers of the request; empty if the server returns none."""
        if not self.script.returns_checksums:
            return {}
        return {k: v for k, v in self.headers.items() if k.lower().startswith("x-amz-checksum-c")}

    def _create(self, _: bytes) -> None:
        name = f"upload-{len(self.script.uploads)}-{len(self.script.seen)}"
        self.script.uploads[name] = {}
        self.answer(200, xml("InitiateMultipartUploadResult", UploadId=name))

    def _part(self, body: bytes) -> None:
        self.script.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = body
        self.answer(200, ETag=etag(body), **self.checksums())

    def _complete(self, _: bytes) -> None:
        if self.query["uploadId"] not in self.script.uploads:
            self.error(404, "NoSuchUpload")
            return
        tag = self.put_together()
        checksums = {
            f"Checksum{name.split('-')[-1].upper()}": value
            for name, value in self.checksums().items()
        }
        self.answer(200, xml("CompleteMultipartUploadResult", ETag=tag, **checksums))

    def put_together(self) -> str:
        """Complete the upload without an answer. Return the object's ETag."""
        parts = self.script.uploads.pop(self.query["uploadId"])
        tag = part_etag(parts)
        self.store(b"".join(parts[number] for number in sorted(parts)), tag)
        return tag

    def _abort(self, _: bytes) -> None:
        found = self.script.uploads.pop(self.query["uploadId"], None)
        if found is None:
            self.error(404, "NoSuchUpload")
        else:
            self.answer(204)

    def _delete(self, _: bytes) -> None:
        self.script.objects.pop(self.key, None)
        self.answer(204)

    def _head(self, _: bytes) -> None:
        data = self.script.objects.get(self.key)
        if data is None:
            self.error(404, "")
            return
        self.answer(200, data, ETag=self.stored_etag, **self.script.head_checksum(data))

    def _get(self, _: bytes) -> None:
        data = self.script.objects[self.key]
        start, end = self.asked()
        if self.headers.get("If-Match") not in (None, self.stored_etag):
            self.error(412, "PreconditionFailed")
            return
        total = f"bytes {start}-{end}/{len(data)}"
        self.answer(206, data[start : end + 1], ETag=self.stored_etag, Content_Range=total)

    def _list(self, _: bytes) -> None:
        prefix, until = self.query.get("prefix", ""), self.query.get("delimiter")
        keys = [key for key in sorted(self.script.objects) if key.startswith(prefix)]
        found = [("Contents", "Key", key) for key in keys]
        if until:
            below = {key[: key.find(until, len(prefix)) + 1] for key in keys}
            found = [("CommonPrefixes", "Prefix", name) for name in sorted(below - {""})]
        inner = "".join(_element(kind, _element(name, value)) for kind, name, value in found)
        self.answer(200, _answer_of("ListBucketResult", _element("Name", "bucket") + inner))

    def _pending(self, _: bytes) -> None:
        # Keys of uploads are not kept.
        self.answer(200, xml("ListMultipartUploadsResult", Bucket="bucket"))

    def _remove(self, body: bytes) -> None:
        keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
        for key in keys:
            self.script.objects.pop(key, None)
        done = "".join(_element("Deleted", _element("Key", key)) for key in keys)
        self.answer(200, _answer_of("DeleteResult", done))

    def asked(self) -> tuple[int, int]:
        """Return the first and the last byte of the requested range."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        return int(found[1]), int(found[2])

    def reset(self) -> None:
        """Break the connection so that the client gets ECONNRESET."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.close()


def answer(status: int, code: str) -> Fault:
    """Return a fault that answers with an HTTP status and an S3 error code."""
    return lambda handler, _: handler.error(status, code)


def reset(handler: Handler, _: bytes) -> None:
    """A fault: break the connection in the middle of the request's body."""
    handler.rfile.read(handler.length // 2)
    handler.reset()


def silence(handler: Handler, _: bytes) -> None:
    """A fault: send no answer until the test ends or the patience of 20 s is over."""
    handler.script.released.wait(_PATIENCE_S)
    handler.reset()


reset.unread = silence.unread = True


def _operation(method: str, query: dict[str, str]) -> str:
    if "uploads" in query:
        return {"POST": "create", "GET": "pending"}[method]
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}[method]
    if "list-type" in query:
        return "list"
    return "remove" if "delete" in query else method.lower()


def etag(data: bytes) -> str:
    """Return the ETag of an object that one PutObject stored, quoted."""
    return f'"{hashlib.md5(data).hexdigest()}"'


def part_etag(parts: dict[int, bytes]) -> str:
    """Return the ETag of an object that was uploaded in parts, quoted."""
    digests = b"".join(hashlib.md5(parts[number]).digest() for number in sorted(parts))
    return f'"{hashlib.md5(digests).hexdigest()}-{len(parts)}"'


def xml(kind: str, **values: str) -> bytes:
    """Return an XML answer with the root element `kind`."""
    return _answer_of(kind, "".join(_element(name, value) for name, value in values.items()))


def _answer_of(kind: str, inner: str) -> bytes:
    return f"<?xml version='1.0'?>{_element(kind, inner)}".encode()


def _element(name: str, inner: str) -> str:
    return f"<{name}>{inner}</{name}>"


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close waits for them
    script: ScriptedS3

    def __init__(self, script: ScriptedS3, tls: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self._tls = script, tls
        self._open: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        # The handshake happens at the first read, in the connection's thread: here it would block
        # the accept loop.
        if self._tls is not None:
            connection = self._tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore it: the client or a fault has broken the connection."""

    def hang_up(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def scripted_s3(tls: ssl.SSLContext | None = None) -> Iterator[ScriptedS3]:
    """Run the server on 127.0.0.1 for one with-block; with `tls` it speaks https."""
    script = ScriptedS3()
    server = _Server(script, tls)
    scheme = "http" if tls is None else "https"
    script.endpoint_url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield script
    finally:
        script.released.set()
        server.shutdown()
        thread.join()
        server.hang_up()
        server.server_close()
