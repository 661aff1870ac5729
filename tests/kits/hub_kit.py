"""A Hub of the tests on loopback addresses: repositories with commits, and a second server that has the bytes.

It answers as the Hub does where huggingface_hub and a reader look: HEAD of ``resolve`` states commit, tag and size and
sends to another host, whose addresses are signed; that host answers ranges. It logs requests and makes faults.
"""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """Files by repository and commit; ``main`` is the last commit."""

    def __init__(self):
        self.commits, self.log, self.faults = {}, [], []
        self.gated, self.signature = set(), 1
        self._lock = threading.Lock()

    def commit(self, repository, **files):
        """Add a commit with these files (dots for the suffix are written as two underscores); its hash."""
        content = {name.replace("__", "."): body for name, body in files.items()}
        known = self.commits.setdefault(repository, [])
        digest = hashlib.sha1(f"{repository}{len(known)}".encode()).hexdigest()
        known.append((digest, (known[-1][1] if known else {}) | content))
        return digest

    def order(self, *faults):
        """Have these happen in turn: nothing, a status, or as a negative number the bytes before a body is cut."""
        self.faults[:] = faults

    def found(self, path):
        """Commit, tag and bytes of the file at a path of ``resolve``; else the error that the Hub states."""
        repository, _, rest = path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        commits = self.commits.get(repository.removeprefix("datasets/"))
        if commits is None:
            return "RepoNotFound"
        if repository in self.gated:
            return "GatedRepo"
        by_name = dict(commits) | {"main": commits[-1][1]}
        if revision not in by_name:
            return "RevisionNotFound"
        if name not in by_name[revision]:
            return "EntryNotFound"
        commit = commits[-1][0] if revision == "main" else revision
        body = by_name[revision][name]
        return commit, hashlib.sha256(body).hexdigest(), body

    def by_tag(self, tag):
        return next(
            body
            for commits in self.commits.values()
            for _, files in commits
            for body in files.values()
            if hashlib.sha256(body).hexdigest() == tag
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    @property
    def hub(self):
        return self.server.hub

    def send(self, status, body=b"", cut=None, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
            if body:
                self.hub.log[-1]["bytes"] = len(body)
            if cut is not None:
                self.close_connection = True

    def note(self):
        with self.hub._lock:
            self.hub.log.append({"method": self.command, "path": self.path, "range": self.headers.get("Range")})
            return self.hub.faults.pop(0) if self.hub.faults else None


class _Questions(_Handler):
    def do_GET(self):
        """All files of a commit, as the Hub lists them: those of LFS by their SHA-256, others by that of git."""
        if not self.path.startswith(("/api/models/", "/api/datasets/")):  # huggingface_hub asks for itself
            self.send(404)
            return
        fault = self.note()
        if fault is not None:
            self.send(fault)
            return
        repository, _, rest = self.path.partition("?")[0].removeprefix("/api/").partition("/revision/")
        commits = self.hub.commits.get("/".join(repository.split("/")[1:]))
        if commits is None:
            self.send(404, X_Error_Code="RepoNotFound")
            return
        commit, files = next((each for each in commits if each[0] == rest), commits[-1])
        siblings = []
        for name, body in files.items():
            tag = hashlib.sha256(body).hexdigest()
            lfs = {"lfs": {"sha256": tag, "size": len(body), "pointerSize": 130}} if len(body) > 1000 else {}
            siblings.append({"rfilename": name, "size": len(body), "blobId": "0" * 40 if lfs else tag, **lfs})
        self.send(200, json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode())

    def do_HEAD(self):
        fault = self.note()
        if fault is not None:
            self.send(fault, **({"Retry-After": 0} if fault == 429 else {}))
            return
        found = self.hub.found(self.path)
        if isinstance(found, str):
            self.send(403 if found == "GatedRepo" else 404, X_Error_Code=found, X_Error_Message=found)
            return
        commit, tag, body = found
        place = f"{self.server.bytes_at}/{tag}?signature={self.hub.signature}"
        self.send(302, X_Repo_Commit=commit, X_Linked_ETag=f'"{tag}"', X_Linked_Size=len(body), Location=place)


class _Bytes(_Handler):
    def do_GET(self):
        fault = self.note()
        tag, _, signature = self.path.strip("/").partition("?signature=")
        if self.headers.get("Authorization"):
            raise AssertionError("a token left the Hub")
        if int(signature) != self.hub.signature or fault == 403:
            self.send(403)
            return
        if fault is not None and fault > 0:
            self.send(fault)
            return
        body = self.hub.by_tag(tag)
        start, stop = (int(part) for part in self.headers["Range"].removeprefix("bytes=").split("-"))
        extent = f"bytes {start}-{min(stop + 1, len(body)) - 1}/{len(body)}"
        self.send(206, body[start : stop + 1], cut=fault and -fault, Content_Range=extent)


@contextmanager
def running():
    """A Hub, and its address, as long as the block runs."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in (_Questions, _Bytes)]
    hub = Hub()
    for server in servers:
        server.daemon_threads = True
        server.hub = hub
        threading.Thread(target=server.serve_forever, daemon=True).start()
    servers[0].bytes_at = f"http://127.0.0.1:{servers[1].server_port}"
    try:
        yield hub, f"http://127.0.0.1:{servers[0].server_port}"
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
