"""Real servers behind a proxy that answers CompleteMultipartUpload in their place."""

from __future__ import annotations

import http.client
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import torch
from support.s3_servers import SERVERS, s3_server

from iobench import Checkpointer, KeepLast
from iobench.errors import TransferError
from iobench.testing import Bucket, LocalS3
from iobench.writers.s3 import S3Writer


class _Proxy(BaseHTTPRequestHandler):
    """Forwards requests. With `lies`, it answers a completion with 200 and no body.

    The store still gets the completion, unless it is "kept back".
    """

    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        lies = self.server.lies if self.command == "POST" and "uploadId=" in self.path else ""
        status, headers, answer = 200, [], b""
        if lies != "kept back":
            upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
            upstream.request(self.command, self.path, body, dict(self.headers))
            got = upstream.getresponse()
            status, headers, answer = got.status, got.getheaders(), got.read()
            upstream.close()
        if lies:
            status, headers, answer = 200, [], b""
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 -- names of http.server


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    upstream = ""
    lies = ""


@contextmanager
def _proxy(upstream: str) -> Iterator[_Server]:
    server = _Server(("127.0.0.1", 0), _Proxy)
    server.upstream = urlsplit(upstream).netloc
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[LocalS3]:
    """Each of the two servers."""
    with s3_server(request.param) as running:
        yield running


@pytest.mark.parametrize("lies", ["kept back", "answer lost"])
def test_no_step_is_lost(server, lies: str, request) -> None:
    """A committed step stays until its replacement is proved; no upload is left. moto's HeadObject
    proves a completion whose answer is lost. rclone's has another ETag for an object of parts, and
    no checksum: that save fails."""
    proved = lies == "answer lost" and request.node.callspec.params["server"] == "moto"
    with server.active(), _proxy(server.endpoint_url) as proxy:
        bucket = Bucket(f"{server.target}/run-{secrets.token_hex(4)}")
        url = f"http://127.0.0.1:{proxy.server_port}"
        writer = S3Writer(part_size="5MiB", threads=2, endpoint_url=url, max_attempts=2)
        with Checkpointer(bucket.target, writer=writer, keep=KeepLast(1)) as ckpt:
            ckpt.save({"w": torch.full((2_000_000,), 1.0)}, 1)
            proxy.lies = lies
            if proved:
                ckpt.save({"w": torch.full((2_000_000,), 2.0)}, 2)
            else:
                with pytest.raises(TransferError, match="completing the upload"):
                    ckpt.save({"w": torch.full((2_000_000,), 2.0)}, 2)
            step = 2 if proved else 1
            assert ckpt.steps() == [step]
            assert (ckpt.load()["w"] == step).all()
            names = bucket.names()
            assert {name.partition("/")[0] for name in names} == {f"step-{step}"}
            assert not [name for name in names if "(upload)" in name]
            proxy.lies = ""
            ckpt.save({"w": torch.full((2_000_000,), 3.0)}, 3)
            assert ckpt.steps() == [3]
        writer.client.close()
