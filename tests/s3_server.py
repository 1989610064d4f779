"""A server of Amazon S3's interface in memory, for tensorstore's own driver, with faults on request.

It has what the driver uses: objects with entity tags, conditions on these, ranges, and listing by prefix. Signatures
are not checked. https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
"""

import hashlib
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.object_server import BUCKET, Handler

_LISTED = 100  # names in one answer, so that lists have several


class S3Handler(Handler):
    """Answers the requests of one connection."""

    scheme: ClassVar[str] = "s3"

    def do_GET(self) -> None:
        name, query = self._object()
        with self.server.lock:
            if self._is_elsewhere():
                self.send(404, b"<Error><Code>NoSuchBucket</Code></Error>")
            elif not name:
                self._list(query)
            elif name not in self.server.objects:
                self.send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            elif self.headers.get("If-None-Match") == self._tag(name):
                self.send(304, b"", {"ETag": self._tag(name)})
            else:
                self.send_part(self.server.objects[name][1], {"ETag": self._tag(name)})

    def do_HEAD(self) -> None:
        name, _ = self._object()
        with self.server.lock:
            if self._is_elsewhere() or (name and name not in self.server.objects):
                self.send(404, b"")
                return
            tag = self._tag(name) if name else ""
            is_same = self.headers.get("If-Match", tag) == tag  # asked before a delete, which has no conditions
            self.send(200 if is_same else 412, b"", {"ETag": tag, "x-amz-bucket-region": "us-east-1"})

    def do_PUT(self) -> None:
        self._change(self.body())

    def do_DELETE(self) -> None:
        self._change(None)

    def _change(self, content: bytes | None) -> None:
        name, _ = self._object()
        with self.server.lock:
            if self._is_elsewhere():
                self.send(404, b"<Error><Code>NoSuchBucket</Code></Error>")
                return
            tag = self._tag(name) if name in self.server.objects else None
            wanted = self.headers.get("If-Match", tag)
            if wanted != tag or (tag and self.headers.get("If-None-Match") == "*"):
                self.send(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            elif content is None:
                self.server.objects.pop(name, None)
                self.send(204, b"")
            else:
                self.put(name, content)
                self.send(200, b"", {"ETag": self._tag(name)})

    def _list(self, query: dict[str, str]) -> None:
        after = query.get("continuation-token", query.get("start-after", ""))
        names = sorted(n for n in self.server.objects if n.startswith(query.get("prefix", "")) and n > after)
        shown = names[:_LISTED]
        items = "".join(
            f"<Contents><Key>{escape(n)}</Key><Size>{len(self.server.objects[n][1])}</Size></Contents>" for n in shown
        )
        more = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if len(names) > len(shown) else ""
        is_cut = str(bool(more)).lower()
        text = f"<ListBucketResult><IsTruncated>{is_cut}</IsTruncated>{more}{items}</ListBucketResult>"
        self.send(200, b'<?xml version="1.0" encoding="UTF-8"?>' + text.encode())

    def _tag(self, name: str) -> str:
        """Return the entity tag of an object, which is the same after another write of the same content."""
        return f'"{hashlib.md5(self.server.objects[name][1], usedforsecurity=False).hexdigest()}"'

    def _is_elsewhere(self) -> bool:
        return urlsplit(self.path).path.split("/")[1] != BUCKET

    def _object(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return unquote(parts.path.removeprefix(f"/{BUCKET}").removeprefix("/")), query
