"""A form with one file, which is written to disk while it arrives."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from time import time

from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from kvasir.server.batches.objects import StoredFile, Upload
from kvasir.server.batches.store import RECORD_BYTES, BatchStore
from kvasir.server.batches.threads import in_thread
from kvasir.server.errors import InvalidRequestError

MAX_FILE_BYTES = 200 * 10**6  # as OpenAI has it
FORM_BYTES = 2**16  # of a form beside its file
_MAX_FIELD = 512  # bytes
_STEP = 2**20  # bytes that are held at once for a form of unknown length


class Form:
    """A form that is being read: the text of its fields, and the name of its file."""

    def __init__(self, content_type: str, write: Callable[[bytes], object]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequestError("send the file as multipart/form-data, with a boundary")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_complete = False
        self._write = write
        self._header = self._value = self._disposition = b""
        self._field: str | None = None  # None is the file
        self._data = b""
        with self._errors():
            self._parser = MultipartParser(
                boundary,
                {
                    "on_header_field": self._add_header,
                    "on_header_value": self._add_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_part,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )

    def feed(self, piece: bytes) -> None:
        """Read a piece of the body. Raises InvalidRequestError, and what `write` raises."""
        with self._errors():
            self._parser.write(piece)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FormParserError as error:  # also of a boundary that is too long
            raise InvalidRequestError(f"the form is malformed: {error}") from None

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._disposition, self._data = b"", b""
        self._field = name
        if name in self.fields or (name == "file" and self.filename is not None):
            raise InvalidRequestError(f"the form has two parts named {name!r}", param=name)
        if name == "file":
            given = options.get(b"filename", b"").decode("utf-8", "replace")
            self._field, self.filename = None, given[:_MAX_FIELD] or "file"
        elif name != "purpose":
            message = f"the field {name!r} is unknown or not supported; leave it out"
            raise InvalidRequestError(message, param=name)

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._write(data[start:end])
        elif len(self._data) + end - start > _MAX_FIELD:
            message = f"{self._field}: it has more than {_MAX_FIELD} bytes"
            raise InvalidRequestError(message, param=self._field)
        else:
            self._data += data[start:end]

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._data.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_complete = True


async def read_form(request: Request, content: Content) -> Form:
    """Read a request's form, and write its file to the content, in threads.

    Raises InvalidRequestError for a broken form, and what the content raises.
    """
    form = Form(request.headers.get("content-type", ""), content.write)
    announced = request.headers.get("content-length", "")
    n_bytes = int(announced) if announced.isdecimal() else 0
    await content.hold(max(0, n_bytes - FORM_BYTES), n_bytes)
    async for piece in request.stream():
        await content.hold(len(piece), _STEP)
        await in_thread(None, form.feed, piece)
    if not form.is_complete:
        raise InvalidRequestError("the form is cut off: its last boundary is missing")
    return form


class Content:
    """A content that is uploaded before it is a file: hold room, `add` it, and `close` it."""

    def __init__(self, store: BatchStore, owner: str) -> None:
        self._store = store
        self._upload = Upload(id=f"file-{secrets.token_hex(12)}", owner=owner)
        self._file: BufferedWriter | None = None
        self.n_bytes = 0

    async def hold(self, least: int, most: int) -> None:
        """Hold room for the next bytes of a form. Raises what the store's `hold` does."""
        n_lacking = self.n_bytes + RECORD_BYTES - self._upload.bytes
        if n_lacking + least > 0:
            await self._store.hold(self._upload, n_lacking + least, n_lacking + most)

    def write(self, data: bytes) -> None:
        """Append bytes for which room is held to the content. Raises OSError."""
        self.n_bytes += len(data)
        if self._file is None:
            self._file = self._store.path(self._upload.id).open("xb")
        self._file.write(data)

    async def add(self, filename: str) -> StoredFile:
        """Make a file of the content. Raises OSError, and what the store's `add` does."""

        def written() -> StoredFile:
            if self._file is not None:
                self._file.flush()
                os.fsync(self._file.fileno())
            return StoredFile(
                id=self._upload.id,
                bytes=self.n_bytes,
                created_at=int(time()),
                filename=filename,
                purpose="batch",
                owner=self._upload.owner,
            )

        return await self._store.add(self._upload, written)

    async def close(self) -> None:
        """Remove the content, unless it has become a file."""
        with suppress(OSError):  # bytes that no longer fit on the disk
            if self._file is not None:
                await in_thread(None, self._file.close)
        await self._store.drop(self._upload)
