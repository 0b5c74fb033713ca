"""`draftsmith serve` with learning: joins the server, which hands out round records, to the buffer,
which stores them."""

from __future__ import annotations

from draftsmith.serve.config import ServeConfig


def run(config: ServeConfig) -> int:
    from draftsmith.serve.config_checks import check
    from draftsmith.serve.launch import launch, must_launch

    if must_launch(config):
        # Its processes load the server, this one does not.
        check(config)
        return launch(config)

    from draftsmith.distill.buffer.process import ProcessWriter, WriterJob
    from draftsmith.distill.buffer.redaction import load_hook
    from draftsmith.drafters.target.target import Target
    from draftsmith.record import Sink
    from draftsmith.serve.command import run as serve

    if config.redact is not None:
        load_hook(config.redact)  # refused here where it cannot be loaded

    def make_sink(config: ServeConfig, target: Target) -> Sink:
        assert config.learn is not None
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

    return serve(config, make_sink)
