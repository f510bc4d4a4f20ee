"""An OpenTelemetry collector that keeps what it is sent by OTLP/HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from tests.kit.fake_completions import running
from tests.kit.fake_runner import TIMEOUT


class Collector:
    """A collector that answers a batch only while `may_answer` is set.

    batches: the path that each batch was sent to, and its spans.
    """

    def __init__(self) -> None:
        self.batches = SimpleQueue[tuple[str, ResourceSpans]]()
        self.may_answer = threading.Event()
        self.may_answer.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for spans in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.batches.put((self.path, spans))
                assert collector.may_answer.wait(TIMEOUT)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/traces"


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    with running(collector.server):
        try:
            yield collector
        finally:
            collector.may_answer.set()
