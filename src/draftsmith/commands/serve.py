"""`draftsmith serve` with learning: joins the server, or an engine in Python, which hands out round
records, to the buffer, which stores them."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from draftsmith.lock import on_signals, say_stopping
from draftsmith.progress import loading
from draftsmith.serve.config import ServeConfig
from draftsmith.serve.config_checks import check

if TYPE_CHECKING:
    from draftsmith.drafters.target.target import Target
    from draftsmith.record import Sink


def run(config: ServeConfig) -> int:
    check(config)  # before torch, which takes seconds to import

    def end() -> None:
        say_stopping(config.drain_s)
        os._exit(0)  # neither libraries nor their threads hold it up

    with on_signals(end, signal.SIGTERM):  # until it answers, which has an end of its own
        with loading():
            from draftsmith.serve.command import run as serve

        return serve(config, make_sink)


def make_sink(config: ServeConfig, target: Target) -> Sink:
    """Writer of the buffer that the options name."""
    from draftsmith.distill.buffer.process import ProcessWriter, WriterJob
    from draftsmith.distill.buffer.redaction import load_hook

    assert config.learn is not None
    if config.redact is not None:
        load_hook(config.redact)  # refused here where it cannot be loaded
    return ProcessWriter(
        WriterJob(
            buffer=config.learn,
            share=config.learn_share,
            distributions=config.learn_distributions,
            redact=config.redact,
            tokenizer=target.name,
            trust_remote_code=target.trust_remote_code,
        )
    )
