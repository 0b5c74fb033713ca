"""draftsmith: train drafters for any Hugging Face causal LM, serve the pair losslessly, learn from
every served token."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from draftsmith.version import __version__


class _Function(ModuleType):
    """A folder of code that is called as the command of its name: `draftsmith.train(...)`."""

    def __call__(self, *given: Any, **options: Any) -> Any:
        """As the function of the same name in `draftsmith.commands.python`."""
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module("draftsmith.commands.python"), name)(*given, **options)


# The import of a folder would take the place of a function of that name.
for _name in ("distill", "train"):
    import_module(f"draftsmith.{_name}").__class__ = _Function

if TYPE_CHECKING:
    from draftsmith.commands.python import distill, train
    from draftsmith.serve.api import Engine
    from draftsmith.serve.sampling.params import SamplingParams

__all__ = ["Engine", "SamplingParams", "__version__", "distill", "train"]

_HOMES = {"Engine": "draftsmith.serve.api", "SamplingParams": "draftsmith.serve.sampling.params"}


def __getattr__(name: str) -> Any:
    """Load a name on first use: the command line must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    with import_module("draftsmith.progress").loading(name == "Engine"):
        found = getattr(import_module(_HOMES[name]), name)
    if name == "Engine":
        # Joined here to the buffer, which `serve` may not import.
        found.make_sink = import_module("draftsmith.commands.serve").make_sink
    return found
