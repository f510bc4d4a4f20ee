"""A server that keeps the bodies it gets and answers each by a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Bodies = list[dict[str, Any]]
# Bytes are a response, after which the connection ends unless they end with a last chunk.
Reply = Callable[[dict[str, Any]], dict[str, Any] | bytes]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bodies: Bodies
    reply: tuple[Reply]
    status = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        reply = self.reply[0](body)
        if isinstance(reply, bytes):
            self.wfile.write(reply)
            self.close_connection = not reply.endswith(b"\r\n0\r\n\r\n")
            return
        answer = json.dumps(reply).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@contextmanager
def answering(reply: Reply, status: int = 200) -> Iterator[tuple[str, Bodies]]:
    """Yield the server's URL and the bodies so far."""
    bodies: Bodies = []
    values = {"bodies": bodies, "reply": (reply,), "status": status}
    with ThreadingHTTPServer(("127.0.0.1", 0), type("One", (Handler,), values)) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()
