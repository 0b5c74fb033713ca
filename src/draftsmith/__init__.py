"""draftsmith: train drafters for any Hugging Face causal LM, serve the pair losslessly, learn from every served token."""

from draftsmith.version import __version__

__all__ = ["__version__"]
