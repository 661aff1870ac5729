"""moto's S3 on a port of the loopback address, in a process of its own, with a log of requests and faults to order.

Run as a program it prints its port. ``/__control`` takes what to do as JSON and returns the log: the counts of a test
are those that the server saw.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from urllib.parse import parse_qsl

FAULTS: list[dict] = []
LOG: list[dict] = []
LOCK = threading.Lock()


def _answer(start, status, body):
    start(status, [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
    return [body]


def _refuse(environ, start, status, code):
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>ordered</Message></Error>".encode()
    return _answer(start, f"{status} Fault", body)


def _what(method, query):
    """What a request of an upload does, empty for all others."""
    if "uploads" in query:
        return "begin" if method == "POST" else "uploads"
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}.get(method, "")
    return "put" if method == "PUT" else ""


def _is_that(environ):
    """Whether the object is the one that If-Match names: moto does not look when an upload is completed."""
    from moto.s3.models import s3_backends

    wanted = environ.get("HTTP_IF_MATCH")
    _, bucket, key = environ["PATH_INFO"].split("/", 2)
    found = next(iter(s3_backends.values()))["aws"].get_object(bucket, key)
    return wanted is None or (found is not None and found.etag == wanted)


def _fault(request):
    """The fault that was ordered for a request, counted down."""
    with LOCK:
        for fault in FAULTS:
            if fault["times"] and all(request[key] == fault.get(key, request[key]) for key in ("method", "what")):
                if fault.get("after", 0):
                    fault["after"] -= 1
                    continue
                fault["times"] -= 1
                return fault
    return None


class Logged:
    """The application of moto. It logs requests and answers some with faults."""

    def __init__(self, application):
        self.application = application

    def control(self, environ, start):
        order = json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)) or b"{}")
        with LOCK:
            body = json.dumps(LOG).encode()
            LOG.clear()
            FAULTS[:] = order.get("faults", FAULTS)
        return _answer(start, "200 OK", body)

    def __call__(self, environ, start):
        if environ["PATH_INFO"] == "/__control":
            return self.control(environ, start)
        query = dict(parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
        request = {
            "method": environ["REQUEST_METHOD"],
            "path": environ["PATH_INFO"],
            "what": _what(environ["REQUEST_METHOD"], query),
            "part": query.get("partNumber"),
            "range": environ.get("HTTP_RANGE"),
            "if_match": environ.get("HTTP_IF_MATCH"),
            "if_none_match": environ.get("HTTP_IF_NONE_MATCH"),
            "sent": int(environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH") or environ.get("CONTENT_LENGTH") or 0),
            "bytes": 0,
        }
        with LOCK:
            LOG.append(request)
        fault = _fault(request) or {}
        if "status" in fault:
            return _refuse(environ, start, fault["status"], fault.get("code", "SlowDown"))
        time.sleep(fault.get("sleep", 0))
        if fault.get("ignore_conditions"):
            environ.pop("HTTP_IF_MATCH", None)
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if request["what"] == "complete" and not _is_that(environ):
            return _refuse(environ, start, 412, "PreconditionFailed")

        def begin(status, headers, *rest):
            request["status"] = int(status.split()[0])
            if request["method"] != "HEAD":
                request["bytes"] = int(dict(headers).get("Content-Length", 0))
            return start(status, headers, *rest)

        body = self.application(environ, begin)
        if fault.get("lose_answer"):
            environ["werkzeug.socket"].settimeout(0.05)  # the server waits for more of the request
            b"".join(body)
            raise ConnectionResetError
        if "cut" in fault:
            environ["werkzeug.socket"].settimeout(5)
            return _cut(body, fault["cut"])
        return body


def _cut(body, length):
    """The first bytes of a body, then a broken connection."""
    yield b"".join(body)[:length]
    raise ConnectionResetError


def main():
    os.environ.setdefault("MOTO_S3_DEFAULT_KEY_BUFFER_SIZE", str(1 << 30))  # in memory
    os.environ.setdefault("S3_UPLOAD_PART_MIN_SIZE", "4096")
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    server = make_server("127.0.0.1", 0, Logged(DomainDispatcherApplication(create_backend_app)), threaded=True)
    print(server.port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()  # it ends with the process that started it


if __name__ == "__main__":
    main()
