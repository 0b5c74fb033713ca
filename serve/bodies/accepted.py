"""Fields that clients send and that cannot change an answer: to ignore them is to honour them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from draftsmith.serve.bodies.formats import JsonObject, StrictModel, Text


def _is_off(value: bool) -> bool:
    if value:
        raise ValueError("it is true, which is not supported; leave it out")
    return value


Off = Annotated[bool, AfterValidator(_is_off)]


class AcceptedFields(StrictModel):
    """Bookkeeping of the client and hints about caches, speed and price."""

    user: Text | None = None
    safety_identifier: Text | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: Text | None = None


class AcceptedChatFields(AcceptedFields):
    modalities: list[Literal["text"]] | None = None
    prediction: JsonObject | None = None  # of the answer's text, a hint about speed
