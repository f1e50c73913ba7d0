"""ScriptedS3: a small S3 on a real socket, in memory, that fails as it is told to."""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Fault = Callable[["Handler", bytes], bool]
"""Is given the request and its body; True when it has dealt with it, False to go on as usual."""


@dataclass
class ScriptedS3:
    """What is stored, what was asked, and what is to go wrong."""

    endpoint_url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    _faults: list[tuple[str, Fault, list[int]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, operation: str, fault: Fault, *, times: int = 1, after: int = 0) -> None:
        """Have `fault` meet the next `times` requests of `operation`, `after` so many good ones."""
        self._faults.append((operation, fault, [after, times]))

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
    """One connection. `operation` is as S3 calls it, in short: put, create, part, complete ..."""

    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *arguments: object) -> None:
        pass

    def _serve(self) -> None:
        script: ScriptedS3 = self.server.script
        parts = urlsplit(self.path)
        self.query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        self.key = parts.path.removeprefix("/bucket/")
        self.operation = _operation(self.command, self.query)
        self.length = int(self.headers.get("Content-Length", 0))
        fault = script.fault_for(self.operation)
        if fault is not None and getattr(fault, "unread", False):
            fault(self, b"")
            return
        body = self.rfile.read(self.length)
        if fault is None or not fault(self, body):
            getattr(self, f"_{self.operation}")(script, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>scripted</Message></Error>"
        self.answer(status, b"" if self.command == "HEAD" else text.encode())

    def _put(self, script: ScriptedS3, body: bytes) -> None:
        script.objects[self.key] = body
        self.answer(200, ETag=etag(body), **self.checksums())

    def checksums(self) -> dict[str, str]:
        return {k: v for k, v in self.headers.items() if k.lower().startswith("x-amz-checksum-c")}

    def _create(self, script: ScriptedS3, body: bytes) -> None:
        name = f"upload-{len(script.uploads)}-{len(script.seen)}"
        script.uploads[name] = {}
        self.answer(200, _xml("InitiateMultipartUploadResult", UploadId=name))

    def _part(self, script: ScriptedS3, body: bytes) -> None:
        script.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = body
        self.answer(200, ETag=etag(body), **self.checksums())

    def _complete(self, script: ScriptedS3, body: bytes) -> None:
        if self.query["uploadId"] not in script.uploads:
            self.error(404, "NoSuchUpload")
            return
        parts = script.uploads.pop(self.query["uploadId"])
        script.objects[self.key] = b"".join(parts[number] for number in sorted(parts))
        told = {
            f"Checksum{name.split('-')[-1].upper()}": value
            for name, value in self.checksums().items()
        }
        self.answer(200, _xml("CompleteMultipartUploadResult", ETag=part_etag(parts), **told))

    def _abort(self, script: ScriptedS3, body: bytes) -> None:
        found = script.uploads.pop(self.query["uploadId"], None)
        if found is None:
            self.error(404, "NoSuchUpload")
        else:
            self.answer(204)

    def _delete(self, script: ScriptedS3, body: bytes) -> None:
        script.objects.pop(self.key, None)
        self.answer(204)

    def _head(self, script: ScriptedS3, body: bytes) -> None:
        data = script.objects.get(self.key)
        if data is None:
            self.error(404, "")
            return
        self.answer(200, data, ETag=etag(data))

    def _get(self, script: ScriptedS3, body: bytes) -> None:
        data = script.objects[self.key]
        start, end = self.range()
        if self.headers.get("If-Match") not in (None, etag(data)):
            self.error(412, "PreconditionFailed")
            return
        total = f"bytes {start}-{end}/{len(data)}"
        self.answer(206, data[start : end + 1], ETag=etag(data), Content_Range=total)

    def range(self) -> tuple[int, int]:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found is not None
        return int(found[1]), int(found[2])

    def reset(self) -> None:
        """Break the connection so that the other side gets ECONNRESET."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.close()


def _operation(method: str, query: dict[str, str]) -> str:
    if "uploads" in query:
        return "create"
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}[method]
    return method.lower()


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def part_etag(parts: dict[int, bytes]) -> str:
    digests = b"".join(hashlib.md5(parts[number]).digest() for number in sorted(parts))
    return f'"{hashlib.md5(digests).hexdigest()}-{len(parts)}"'


def _xml(kind: str, **values: str) -> bytes:
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in values.items())
    return f"<?xml version='1.0'?><{kind}>{inner}</{kind}>".encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close waits for them
    script: ScriptedS3

    def __init__(self, script: ScriptedS3) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self._open: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client or a fault has broken the connection."""

    def hang_up(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def scripted_s3() -> Iterator[ScriptedS3]:
    """The server, listening on 127.0.0.1 for the length of the block."""
    script = ScriptedS3()
    server = _Server(script)
    script.endpoint_url = f"http://127.0.0.1:{server.server_address[1]}"
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
