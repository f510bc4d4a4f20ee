"""OpenAI's files: those of batches, with what they answered."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from kvasir.server.api.http.responses import errors, state_of
from kvasir.server.api.http.upload import Content, read_form
from kvasir.server.api.schemas import Page, ResponseBody
from kvasir.server.batches.objects import File
from kvasir.server.batches.store import BatchStore
from kvasir.server.errors import InvalidRequestError, NotFoundError

router = APIRouter()

Item = TypeVar("Item", bound=Any)
ERRORS = errors(400, 401, 403, 404, 429, 503)
CHANGE_ERRORS = ERRORS | errors(409, 413, 507)
_UPLOAD = {
    "type": "object",
    "required": ["purpose", "file"],
    "additionalProperties": False,
    "properties": {
        "purpose": {"const": "batch"},
        "file": {"type": "string", "format": "binary", "minLength": 1},
    },
}
_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}}
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The content.", "content": {"application/octet-stream": {}}}
}


class FileList(Page[File]):
    """A page of files, the newest first unless asked otherwise."""


class DeletedFile(ResponseBody):
    """A file that is no more."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


async def store_of(request: Request) -> BatchStore:
    """Return the store, which is there while these routes are. Raises UnavailableError."""
    store: BatchStore = request.app.state.batches.store
    await store.refresh()
    return store


def owner_of(request: Request) -> str:
    """Return the name of the request's API key. Raises InvalidRequestError if it has none.

    The number of its line would make files another key's once the lines change.
    """
    name = state_of(request.scope).caller.name
    if re.fullmatch(r"line-[0-9]+", name):
        raise InvalidRequestError(
            "files and batches belong to named keys; write name=… before this key in api_key_file"
        )
    return name


Store = Annotated[BatchStore, Depends(store_of)]
Owner = Annotated[str, Depends(owner_of)]
FileId = Annotated[str, Path(json_schema_extra={"minLength": 1})]
After = Annotated[str | None, Query(description="Begin behind this id.")]


def page(items: Iterable[Item], after: str | None, limit: int) -> dict[str, Any]:
    """Return the fields of a list's page. Raises NotFoundError for an unknown `after`."""
    left = list(items)
    if after is not None:
        places = [place for place, item in enumerate(left) if item.id == after]
        if not places:
            raise NotFoundError(f"after: the list has no {after!r}", param="after")
        left = left[places[0] + 1 :]
    data = left[:limit]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return {"data": data, "first_id": first, "last_id": last, "has_more": len(left) > limit}


@router.post("/v1/files", responses=CHANGE_ERRORS, openapi_extra=_BODY)
async def upload(request: Request, store: Store, owner: Owner) -> File:
    """Store a file of requests, for a batch."""
    content = Content(store, owner)
    try:
        form = await read_form(request, content)
        if form.fields.get("purpose") != "batch":
            given = form.fields.get("purpose")
            raise InvalidRequestError(f"purpose: it must be batch, not {given!r}", param="purpose")
        if not content.n_bytes or form.filename is None:
            raise InvalidRequestError("file: it is missing or empty", param="file")
        return await content.add(form.filename)
    finally:
        await content.close()


@router.get("/v1/files", responses=ERRORS)
async def files(
    store: Store,
    owner: Owner,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> FileList:
    """List the files of this key."""
    stored = list(store.files.values())  # at once: threads add to them
    mine = [item for item in stored if item.owner == owner]
    fit = [item for item in mine if purpose in (None, item.purpose)]
    return FileList.model_construct(**page(fit if order == "asc" else fit[::-1], after, limit))


@router.get("/v1/files/{file_id}", responses=ERRORS)
async def file(file_id: FileId, store: Store, owner: Owner) -> File:
    """Return the description of a file."""
    return store.file(file_id, owner)


class ContentResponse(FileResponse):
    """The content of a file, whole although the file may be deleted meanwhile."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content."""
        with FilePath(self.path).open("rb") as file:  # noqa: ASYNC230  at once, before a DELETE
            self.path = f"/dev/fd/{file.fileno()}"
            await super().__call__(scope, receive, send)


@router.get("/v1/files/{file_id}/content", responses=ERRORS | _CONTENT, response_class=FileResponse)
async def content(file_id: FileId, store: Store, owner: Owner) -> FileResponse:
    """Return the content of a file."""
    stored = store.file(file_id, owner)
    return ContentResponse(store.path(stored.id), media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", responses=CHANGE_ERRORS)
async def delete(file_id: FileId, store: Store, owner: Owner) -> DeletedFile:
    """Delete a file, unless a batch still reads it."""
    await store.change(lambda: store.delete(store.file(file_id, owner)))
    return DeletedFile(id=file_id)
