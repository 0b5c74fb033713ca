"""draftsmith: train drafters for any Hugging Face causal LM, serve the pair losslessly, learn from
every served token."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.links import check_links
from draftsmith.version import __version__

check_links(Path(__file__).parent)

if TYPE_CHECKING:
    from draftsmith.serve.api import Engine
    from draftsmith.serve.sampling.params import SamplingParams

__all__ = ["Engine", "SamplingParams", "__version__"]

_HOMES = {"Engine": "draftsmith.serve.api", "SamplingParams": "draftsmith.serve.sampling.params"}


def __getattr__(name: str) -> Any:
    """Load a name on first use: the command line must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
