"""A server of Google Cloud Storage's JSON API in memory, for tensorstore's own driver, with faults on request.

It has what the driver uses: objects with generations, conditions on these, ranges, and listing between two names.
https://cloud.google.com/storage/docs/json_api/v1/objects
"""

import json
import sys
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from tests.object_server import BUCKET, Handler, Server


class GcsHandler(Handler):
    """Answers the requests of one connection."""

    scheme: ClassVar[str] = "gs"

    def do_GET(self) -> None:
        name, query = self._object()
        with self.server.lock:
            if name is None:
                self._list(query)
            elif name not in self.server.objects:
                self.send(404, b"{}")
            elif query.get("alt") != "media":
                self.send(200, self._facts(name))
            else:
                self._content(name, query)

    def do_POST(self) -> None:
        query = self._query()
        self._change(query["name"], query, self.body())

    def do_DELETE(self) -> None:
        name, query = self._object()
        assert name is not None
        self._change(name, query, None)

    def _change(self, name: str, query: dict[str, str], content: bytes | None) -> None:
        objects = self.server.objects
        with self.server.lock:
            generation = objects[name][0] if name in objects else 0
            if self._bucket() != BUCKET or (content is None and not generation):
                self.send(404, b"{}")
            elif int(query.get("ifGenerationMatch", generation)) != generation:
                self.send(412, b"{}")
            elif content is None:
                del objects[name]
                self.send(204, b"")
            else:
                self.put(name, content)
                self.send(200, self._facts(name))

    def _list(self, query: dict[str, str]) -> None:
        if self._bucket() != BUCKET:
            self.send(404, b"{}")
            return
        start, end = query.get("startOffset", ""), query.get("endOffset")
        names = sorted(name for name in self.server.objects if name >= start and (not end or name < end))
        self.send(200, json.dumps({"items": [json.loads(self._facts(name)) for name in names]}).encode())

    def _content(self, name: str, query: dict[str, str]) -> None:
        generation, content = self.server.objects[name]
        headers = {"x-goog-generation": str(generation)}
        if int(query.get("ifGenerationNotMatch", -1)) == generation:
            self.send(304, b"", headers)
            return
        self.send_part(content, headers)

    def _facts(self, name: str) -> bytes:
        generation, content = self.server.objects[name]
        return json.dumps({"name": name, "generation": str(generation), "size": str(len(content))}).encode()

    def _query(self) -> dict[str, str]:
        return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}

    def _bucket(self) -> str:
        return urlsplit(self.path).path.split("/b/")[1].split("/")[0]

    def _object(self) -> tuple[str | None, dict[str, str]]:
        _, _, name = urlsplit(self.path).path.partition("/o/")
        return unquote(name) or None, self._query()


if __name__ == "__main__":
    with Server(GcsHandler, int(sys.argv[1])) as served:
        served.serve_forever()
