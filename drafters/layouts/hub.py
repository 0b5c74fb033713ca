"""Models and drafts that are no folder here: the Hub is asked once whether it answers.
huggingface_hub asks again for each file, up to half a minute long and in silence."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.file_download import get_hf_file_metadata, repo_folder_name
from huggingface_hub.utils import validate_repo_id

from draftsmith.drafters.config import named_folders
from draftsmith.drafters.layouts import demo
from draftsmith.errors import UserError, first_line
from draftsmith.progress import say

try:
    # The HTTP library of huggingface_hub 2; its errors do not derive from httpx's.
    from httpx2 import HTTPError
except ImportError:
    from httpx import HTTPError

FAILURES = (HTTPError, OSError)  # what a request may raise, answered or not
KEPT_S = 60.0  # that an answer holds for
CONFIG, ADAPTER, SUFFIX = "config.json", "adapter_config.json", ".gguf"
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")


def check_named(options: Any) -> None:
    """Raises `UserError` for a target, draft, adapter or folder of answers of a command's options
    that is nowhere. Torch-free, for a refusal at once."""
    target, draft = getattr(options, "target", None), getattr(options, "draft", None)
    if target and gguf_file(target) is None:
        ask_hub(split_revision(target)[0])
    if isinstance(draft, str):
        ask_hub(draft, "draft")
    for adapter in named_folders(getattr(options, "lora", None) or ()).values():
        ask_hub(adapter, "LoRA adapter")
        if os.path.isdir(adapter) and not os.path.isfile(os.path.join(adapter, ADAPTER)):
            raise UserError(f"folder {adapter!r} holds no {ADAPTER}; give that of a LoRA adapter")
    answers = getattr(options, "suffix_answers", None)
    if answers not in (None, demo.NAME) and not os.path.isdir(answers):
        raise UserError(f"there is no folder {answers!r}; check the path of the answers")


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
        if type(error) is RepositoryNotFoundError:  # and no gated one
            return (
                f"{what} {path!r} is neither a folder here nor on the Hub; check the path, or log "
                "in (`hf auth login`) if it is private"
            )
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
    except (HFValidationError, OSError) as error:
        of = "" if revision is None else f" of revision {revision!r}"
        raise UserError(
            f"{what} {path!r}{of} is neither a folder nor a reachable Hub id; check the path"
        ) from error


def split_revision(path: str | Path) -> tuple[str, str | None]:
    """Hub id and revision of `org/name@revision`; of anything else the path, and None."""
    name, _, revision = str(path).partition("@")
    return (name, revision) if revision and not os.path.exists(path) else (str(path), None)


def gguf_file(path: str) -> Path | None:
    """The file that `path` names, fetched where it is not here; None of what is no GGUF."""
    local = Path(path)
    if local.is_dir():
        return _only_file(local)
    if local.is_file() and local.suffix == SUFFIX:
        return local
    if path == demo.NAME:
        return demo.file()
    if path.endswith(SUFFIX):
        return _downloaded(path)
    return None


def _only_file(folder: Path) -> Path | None:
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files or (folder / CONFIG).exists():
        return None
    if len(files) > 1:
        raise UserError(
            f"{str(folder)!r} holds {len(files)} GGUF files, {files[0].name!r} and others; name one"
        )
    return files[0]


def _downloaded(path: str) -> Path:
    repo, _, name = path.partition(":")
    if not name:
        raise UserError(
            f"GGUF file {path!r} does not exist; check the path, or write org/name:file.gguf for "
            "one of the Hub"
        )
    ask_hub(repo)
    try:
        return Path(hf_hub_download(repo, name))
    except (HFValidationError, OSError) as error:
        raise UserError(
            f"GGUF file {path!r} cannot be had from the Hub ({first_line(error)}); check its name"
        ) from error
