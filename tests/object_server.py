"""The objects of a bucket in memory, behind an interface of HTTP, with faults on request: a part of the servers of
each store.
"""

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

BUCKET = "bucket"


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm, wbufsize = True, -1  # an answer is one packet
    server: "Server"
    scheme: ClassVar[str]  # of URLs of objects

    def body(self) -> bytes:
        """Return the content of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def put(self, name: str, content: bytes) -> int:
        """Create or replace an object, and return its generation."""
        generation = next(self.server.generations)
        self.server.objects[name] = (generation, content)
        lost = next((part for part in self.server.lost if part in name), None)
        if lost:
            self.server.lost.remove(lost)
            self.server.next_faults.append("unavailable")
        return generation

    def send_part(self, content: bytes, headers: dict[str, str]) -> None:
        """Send an object, or the range that was asked for."""
        status = 200
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, len(content)) if last else len(content)
            if start >= len(content):
                self.send(416, b"", headers | {"Content-Range": f"bytes */{len(content)}"})
                return
            headers = headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
            status, content = 206, content[start:stop]
        self.send(status, content, headers)

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        fault = self.server.fault()
        if fault == "unavailable":
            status, content, headers = 503, b"", {}
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault == "cut" and len(content) > 1:
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        else:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Server(ThreadingHTTPServer):
    """The objects of one bucket, and how often requests fail."""

    daemon_threads: ClassVar[bool] = True

    def __init__(self, handler: type[Handler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.bucket = f"{handler.scheme}://{BUCKET}"
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.generations, self.lock = itertools.count(1000), threading.Lock()
        self.next_faults: list[str] = []
        self.lost: list[str] = []  # parts of names of objects: of the next write of each, the answer is lost
        self.faults: dict[str, float] = {}  # share of requests: unavailable, cut, slow
        self.slow_s, self.made = 0.2, dict.fromkeys(("unavailable", "cut", "slow"), 0)
        self._random = random.Random(0)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which tensorstore's driver finds this server."""
        url = f"http://127.0.0.1:{self.server_port}"
        if self.bucket.startswith("gs"):
            return {"TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        return {"AWS_ENDPOINT_URL_S3": url, "AWS_REGION": "us-east-1"} | keys

    def fault(self) -> str:
        """What is to be wrong with the next answer."""
        if self.next_faults:
            return self.next_faults.pop()
        place = self._random.random()
        for kind, share in self.faults.items():
            if place < share:
                self.made[kind] += 1
                if kind == "slow":
                    time.sleep(self.slow_s)
                return kind
            place -= share
        return ""


@contextmanager
def serving(handler: type[Handler]) -> Iterator[Server]:
    """Context with a server in a thread."""
    with Server(handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
