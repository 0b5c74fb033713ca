"""`draftsmith serve` with learning: joins the server, which hands out round records, to the buffer, which stores them."""

from __future__ import annotations

from draftsmith.serve.config import ServeConfig


def run(config: ServeConfig) -> int:
    from draftsmith.distill.buffer import BufferWriter
    from draftsmith.drafters.target import Target
    from draftsmith.serve.record import Sink
    from draftsmith.serve.run import run as serve

    def make_sink(config: ServeConfig, target: Target) -> Sink:
        assert config.learn is not None
        return BufferWriter(config.learn)

    return serve(config, make_sink)
