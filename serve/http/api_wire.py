"""What every body on the wire is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a surrogate pair, which is no text; mend its encoding") from error
    return value


Text = Annotated[str, AfterValidator(_is_text)]


class Wire(BaseModel):
    """Strict, so that nothing is converted or ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)
