"""A server of Google Cloud Storage's JSON API in memory, for tensorstore's own driver, with faults on request.

It has what the driver uses: objects with generations, conditions on these, ranges, and listing between two names.
https://cloud.google.com/storage/docs/json_api/v1/objects
"""

import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bucket"


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm, wbufsize = True, -1  # an answer is one packet
    server: "Server"

    def do_GET(self) -> None:
        name, query = self._object()
        with self.server.lock:
            if name is None:
                self._list(query)
            elif name not in self.server.objects:
                self._send(404, b"{}")
            elif query.get("alt") != "media":
                self._send(200, self._facts(name))
            else:
                self._content(name, query)

    def do_POST(self) -> None:
        query = self._query()
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._change(query["name"], query, content)

    def do_DELETE(self) -> None:
        name, query = self._object()
        assert name is not None
        self._change(name, query, None)

    def _change(self, name: str, query: dict[str, str], content: bytes | None) -> None:
        objects = self.server.objects
        with self.server.lock:
            generation = objects[name][0] if name in objects else 0
            if self._bucket() != BUCKET or (content is None and not generation):
                self._send(404, b"{}")
            elif int(query.get("ifGenerationMatch", generation)) != generation:
                self._send(412, b"{}")
            elif content is None:
                del objects[name]
                self._send(204, b"")
            else:
                objects[name] = (next(self.server.generations), content)
                lost = next((part for part in self.server.lost if part in name), None)
                if lost:
                    self.server.lost.remove(lost)
                    self.server.next_faults.append("unavailable")
                self._send(200, self._facts(name))

    def _list(self, query: dict[str, str]) -> None:
        if self._bucket() != BUCKET:
            self._send(404, b"{}")
            return
        start, end = query.get("startOffset", ""), query.get("endOffset")
        names = sorted(name for name in self.server.objects if name >= start and (not end or name < end))
        self._send(200, json.dumps({"items": [json.loads(self._facts(name)) for name in names]}).encode())

    def _content(self, name: str, query: dict[str, str]) -> None:
        generation, content = self.server.objects[name]
        headers = {"x-goog-generation": str(generation)}
        if int(query.get("ifGenerationNotMatch", -1)) == generation:
            self._send(304, b"", headers)
            return
        status = 200
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, len(content)) if last else len(content)
            if start >= len(content):
                self._send(416, b"", headers | {"Content-Range": f"bytes */{len(content)}"})
                return
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            status, content = 206, content[start:stop]
        self._send(status, content, headers)

    def _facts(self, name: str) -> bytes:
        generation, content = self.server.objects[name]
        return json.dumps({"name": name, "generation": str(generation), "size": str(len(content))}).encode()

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        fault = self.server.fault()
        if fault == "unavailable":
            status, content, headers = 503, b"{}", {}
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

    def _query(self) -> dict[str, str]:
        return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}

    def _bucket(self) -> str:
        return urlsplit(self.path).path.split("/b/")[1].split("/")[0]

    def _object(self) -> tuple[str | None, dict[str, str]]:
        _, _, name = urlsplit(self.path).path.partition("/o/")
        return unquote(name) or None, self._query()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Server(ThreadingHTTPServer):
    """The objects of one bucket, and how often requests fail."""

    daemon_threads: ClassVar[bool] = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.generations, self.lock = itertools.count(1000), threading.Lock()
        self.next_faults: list[str] = []
        self.lost: list[str] = []  # parts of names of objects: of the next write of each, the answer is lost
        self.faults: dict[str, float] = {}  # share of requests: unavailable, cut, slow
        self.slow_s, self.made = 0.2, dict.fromkeys(("unavailable", "cut", "slow"), 0)
        self._random = random.Random(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

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
def serving(port: int = 0) -> Iterator[Server]:
    """Context with a server in a thread."""
    with Server(port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


if __name__ == "__main__":
    import sys

    with Server(int(sys.argv[1])) as served:
        served.serve_forever()
