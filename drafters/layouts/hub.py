"""Models and drafts that are no folder here: the Hub is asked once whether it answers.
huggingface_hub asks again for each file, up to half a minute long and in silence."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id

from draftsmith.errors import UserError, first_line
from draftsmith.progress import say

try:
    # The HTTP library of huggingface_hub 2; its errors do not derive from httpx's.
    from httpx2 import HTTPError
except ImportError:
    from httpx import HTTPError

FAILURES = (HTTPError, OSError)  # what a request may raise, answered or not
KEPT_S = 60.0  # that an answer holds for
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")


def ask_hub(path: str | Path, what: str = "model") -> None:
    """Raises `UserError` for a path that nothing is at, and for a Hub id where the Hub does not
    answer and nothing of it is in the cache."""
    if not os.path.exists(path):
        refusal = _refusal(str(path), what, time.monotonic() // KEPT_S)
        if refusal:
            raise UserError(refusal)


@functools.cache
def _refusal(path: str, what: str, period: float) -> str:
    try:
        validate_repo_id(path)
    except HFValidationError:
        return f"there is no folder {path!r}; check the path of the {what}"
    folder = repo_folder_name(repo_id=path, repo_type="model")
    if (Path(constants.HF_HUB_CACHE) / folder / "snapshots").is_dir():
        return ""
    say(f"no folder {path} here; asking the Hub")
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json"))
    except FAILURES as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            return ""  # it answers, and what follows has the sentence
        return (
            f"{what} {path!r} is no folder here and the Hub does not answer "
            f"({first_line(error)}); check the path, or the connection to the Hub"
        )
    return ""


def snapshot(
    path: str, what: str, *, revision: str | None = None, without: Sequence[str] = ()
) -> Path:
    """Folder of a Hub id's files in the user's cache, but for those that match `without`. Raises
    `UserError`."""
    ask_hub(path, what)
    try:
        return Path(snapshot_download(path, revision=revision, ignore_patterns=list(without)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        of = "" if revision is None else f" of revision {revision!r}"
        raise UserError(
            f"{what} {path!r}{of} is neither a folder nor a reachable Hub id; check the path"
        ) from error


def split_revision(path: str | Path) -> tuple[str, str | None]:
    """Hub id and revision of `org/name@revision`; of anything else the path, and None."""
    name, _, revision = str(path).partition("@")
    return (name, revision) if revision and not os.path.exists(path) else (str(path), None)
