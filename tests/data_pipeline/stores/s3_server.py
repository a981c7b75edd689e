"""A small S3 server on loopback: what Arrow's client asks of one, kept in memory, and failures on demand.

moto is the field's own, and ``test_moto.py`` takes the same road through it where it is installed. It brings 22
packages (115 MB), and it cannot break a download in the middle.
"""

from __future__ import annotations

import hashlib
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

_TIME = "2026-01-01T00:00:00.000Z"


@dataclass
class Store:
    """Objects by bucket and key, and what goes wrong."""

    objects: dict[str, bytes] = field(default_factory=dict)
    """By ``bucket/key``."""
    buckets: set[str] = field(default_factory=lambda: {"corpora"})
    requests: Counter[str] = field(default_factory=Counter)
    """How often each method was asked of each path."""
    fault: Callable[[str, str], str] = lambda method, path: ""
    """What happens to a request: nothing, ``cut`` in the middle of its body, or an S3 error's code."""
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def under(self, prefix: str) -> dict[str, bytes]:
        """The objects below a folder, by relative path."""
        # Arrow leaves an empty object for a folder whose last object it removes.
        found = {key: body for key, body in self.objects.items() if not key.endswith("/")}
        return {key.removeprefix(prefix + "/"): body for key, body in found.items() if key.startswith(prefix + "/")}


class S3Server:
    """Serves one store until it is stopped."""

    def __init__(self) -> None:
        self.store = Store()
        handler = type("Handler", (_Handler,), {"store": self.store})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    store: Store
    protocol_version = "HTTP/1.1"
    # Answers of two packets each would wait 40 ms for the client's receipt of the first.
    disable_nagle_algorithm = True
    wbufsize = 1 << 20

    def handle_expect_100(self) -> bool:
        """Tell the client to go on; it would wait a second for this."""
        going_on = super().handle_expect_100()
        self.wfile.flush()
        return going_on

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD

    def _serve(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(parts.path).lstrip("/")
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        body = self._body()
        fault = self.store.fault(self.command, path)
        with self.store.lock:
            self.store.requests[f"{self.command} {path}"] += 1
        if fault and fault != "cut":
            self._fail({"AccessDenied": 403, "InternalError": 500}[fault], fault)
        elif path.partition("/")[0] not in self.store.buckets:
            self._fail(404, "NoSuchBucket")
        elif "/" not in path.rstrip("/"):
            path = path.rstrip("/")
            if self.command == "GET":
                self._answer(200, _listing(self.store, path, query))
            else:
                self._answer(200)
        else:
            getattr(self, f"_{self.command.lower()}")(path, query, body, fault)

    def _head(self, path: str, query: dict[str, str], body: bytes, fault: str) -> None:
        if path not in self.store.objects:
            return self._fail(404, "NoSuchKey")
        content = self.store.objects[path]
        self._answer(200, content, {"ETag": _etag(content), "Content-Type": "binary/octet-stream"})

    def _get(self, path: str, query: dict[str, str], body: bytes, fault: str) -> None:
        content = self.store.objects.get(path)
        if content is None:
            return self._fail(404, "NoSuchKey")
        asked = self.headers.get("Range")
        headers, status = {"ETag": _etag(content)}, 200
        if asked:
            start, _, last = asked.removeprefix("bytes=").partition("-")
            stop = min(int(last or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            content, status = content[int(start) : stop], 206
        self._answer(status, content, headers, cut=fault == "cut")

    def _put(self, path: str, query: dict[str, str], body: bytes, fault: str) -> None:
        if "uploadId" in query:
            self.store.uploads[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self.store.objects[path] = body
        self._answer(200, headers={"ETag": _etag(body)})

    def _post(self, path: str, query: dict[str, str], body: bytes, fault: str) -> None:
        if "uploads" in query:
            number = f"upload{len(self.store.uploads)}"
            self.store.uploads[number] = {}
            xml = f"<Bucket>b</Bucket><Key>k</Key><UploadId>{number}</UploadId>"
            return self._answer(200, _xml("InitiateMultipartUploadResult", xml))
        if "uploadId" in query:
            parts = self.store.uploads.pop(query["uploadId"])
            self.store.objects[path] = b"".join(parts[number] for number in sorted(parts))
            return self._answer(200, _xml("CompleteMultipartUploadResult", '<ETag>"1"</ETag>'))
        return self._fail(400, "InvalidRequest")

    def _delete(self, path: str, query: dict[str, str], body: bytes, fault: str) -> None:
        self.store.objects.pop(path, None)
        self._answer(204)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            raw = b""
            while size := int(self.rfile.readline(), 16):
                raw += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return raw
        # Pieces of a size in hexadecimal each, and checksums behind the last, which is empty.
        found, at = b"", 0
        while True:
            line = raw.index(b"\r\n", at)
            size = int(raw[at:line].partition(b";")[0], 16)
            if not size:
                return found
            found += raw[line + 2 : line + 2 + size]
            at = line + 4 + size

    def _answer(
        self, status: int, content: bytes = b"", headers: dict[str, str] | None = None, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in ({"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>"))


def _listing(store: Store, bucket: str, query: dict[str, str]) -> bytes:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    keys = sorted(key.removeprefix(bucket + "/") for key in store.objects if key.startswith(f"{bucket}/{prefix}"))
    files, folders = [], dict[str, None]()
    for key in keys:
        rest = key[len(prefix) :]
        if delimiter and delimiter in rest:
            folders[prefix + rest.partition(delimiter)[0] + delimiter] = None
        else:
            files.append(key)
    most = int(query.get("max-keys", "1000"))
    body = f"<Name>{bucket}</Name><KeyCount>{len(files) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>"
    for key in files[:most]:
        content = store.objects[f"{bucket}/{key}"]
        body += f"<Contents><Key>{escape(key)}</Key><LastModified>{_TIME}</LastModified>"
        body += f"<ETag>{escape(_etag(content))}</ETag><Size>{len(content)}</Size></Contents>"
    body += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
    return _xml("ListBucketResult", body)


def _xml(name: str, body: str) -> bytes:
    begin = f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">' if name != "Error" else f"<{name}>"
    return f'<?xml version="1.0" encoding="UTF-8"?>{begin}{body}</{name}>'.encode()


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
