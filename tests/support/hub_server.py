"""A model hub on the loopback: what `huggingface_hub` asks of it to fetch a snapshot."""

import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`files` per repository; `gated` and unknown ones are refused. `served` lists the paths."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    broken: bool = False  # it answers everything with status 500
    served: list[str] = field(default_factory=list)
    url: str = ""


def _digest(content):
    return hashlib.sha1(content).hexdigest()


def _tree(files):
    return [
        {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
        for name, content in files.items()
    ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._handle(body=False)

    def do_GET(self):
        self._handle(body=True)

    def _handle(self, *, body):
        path = unquote(urlsplit(self.path).path).strip("/")
        hub = self.server.hub
        hub.served.append(path)
        parts = path.removeprefix("api/models/").split("/")
        name = "/".join(parts[:2])
        if hub.broken:
            return self._answer(500, b"{}", {}, body=body)
        if name in hub.gated:
            return self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"}, body=body)
        if name not in hub.files:
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)
        if parts[2] in ("revision", "resolve", "tree") and parts[3] not in ("main", COMMIT):
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)
        files = hub.files[name]
        if parts[2] == "revision":
            siblings = [{"rfilename": file, "size": len(files[file])} for file in files]
            info = {"id": name, "sha": COMMIT, "siblings": siblings}
            return self._answer(200, json.dumps(info).encode(), {}, body=body)
        if parts[2] == "tree":
            return self._answer(200, json.dumps(_tree(files)).encode(), {}, body=body)
        content = files["/".join(parts[4:])]
        return self._answer(
            200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}, body=body
        )

    def _answer(self, status, content, headers, *, body):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def running_hub():
    """Serve a Hub until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub(url=f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
