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

FAULTS: list[dict] = []
LOG: list[dict] = []
LOCK = threading.Lock()


def _answer(start, status, body):
    start(status, [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
    return [body]


def _fault(request):
    """The fault that was ordered for a request, counted down."""
    with LOCK:
        for fault in FAULTS:
            if fault["times"] and fault.get("method", request["method"]) == request["method"]:
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
            FAULTS[:] = order.get("faults", [])
        return _answer(start, "200 OK", body)

    def __call__(self, environ, start):
        if environ["PATH_INFO"] == "/__control":
            return self.control(environ, start)
        request = {
            "method": environ["REQUEST_METHOD"],
            "path": environ["PATH_INFO"],
            "range": environ.get("HTTP_RANGE"),
            "if_match": environ.get("HTTP_IF_MATCH"),
            "bytes": 0,
        }
        with LOCK:
            LOG.append(request)
        fault = _fault(request) or {}
        if "status" in fault:
            code = fault.get("code", "SlowDown")
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>ordered</Message></Error>".encode()
            return _answer(start, f"{fault['status']} Fault", body)
        time.sleep(fault.get("sleep", 0))
        if fault.get("ignore_if_match"):
            environ.pop("HTTP_IF_MATCH", None)

        def begin(status, headers, *rest):
            request["status"] = int(status.split()[0])
            if request["method"] != "HEAD":
                request["bytes"] = int(dict(headers).get("Content-Length", 0))
            return start(status, headers, *rest)

        body = self.application(environ, begin)
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
