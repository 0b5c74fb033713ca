"""Logging of the libraries underneath, kept to errors: notices would tear the progress line."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings

from draftsmith.progress import is_error


def quiet() -> None:
    """Errors only. Call it before accelerate is imported, which imports DeepSpeed, which logs at
    import."""
    import torch

    if not torch.cuda.is_available():
        # What it would find out by itself, and say so.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in (
        "DeepSpeed",
        "accelerate",
        "torch.distributed",
        "datasets",
        "peft",
        "matplotlib",
        "matplotlib.font_manager",
    ):
        logging.getLogger(name).addFilter(is_error)
    # DeepSpeed calls collectives by the names they had before.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # A part of the extra `train`, which commands that read no data do without.
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        datasets.disable_progress_bars()
