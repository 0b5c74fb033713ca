"""What clients may ask of learning: that the records of an answer of theirs are forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Response

from draftsmith.serve.http.errors import Refusal
from draftsmith.serve.http.schema import documented

if TYPE_CHECKING:
    from draftsmith.serve.http.completions import Server

DOCUMENT: dict[int | str, dict[str, Any]] = {
    **documented(401, 404, 503),
    204: {"description": "Its records are deleted; nothing more of it will be learned from."},
}
DOCUMENT[404]["description"] = "No record of this answer is kept, or nothing is recorded here."
DOCUMENT[503]["description"] = "The buffer cannot be reached; ask again."


def add_learning_endpoints(app: FastAPI, server: Server) -> None:
    # Not async: it takes seconds, in which a thread of the pool waits.
    @app.delete("/v1/learn/{answer}", status_code=204, response_class=Response, responses=DOCUMENT, operation_id="forget")
    def forget(answer: str) -> Response:
        sink = server.loop.engine.recorder.sink
        if sink is None:
            raise Refusal(404, "nothing is recorded by this server; ask the one that answered", code="not_recorded")
        try:
            num_records = sink.forget(answer)
        except OSError as error:
            raise Refusal(503, f"the buffer cannot be reached ({error}); ask again", kind="server_error") from error
        if num_records == 0:
            message = f"no record of {answer!r} is in the buffer; a learner that still holds some drops them"
            raise Refusal(404, message, param="answer", code="not_recorded")
        return Response(status_code=204)
