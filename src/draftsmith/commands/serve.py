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

    from draftsmith.distill.buffer.buffer import BufferWriter, Screen
    from draftsmith.distill.buffer.record_table import tokens_only
    from draftsmith.distill.buffer.redaction import Redactor, load_hook, mask_of
    from draftsmith.drafters.target.target import Target
    from draftsmith.record import Sink
    from draftsmith.serve.command import run as serve

    redact = config.learning.redact
    hook = None if redact is None else load_hook(redact)

    def make_sink(config: ServeConfig, target: Target) -> Sink:
        learning = config.learning
        assert learning.learn is not None
        screens: list[Screen] = []
        if hook is not None:
            tokenizer = target.tokenizer()
            screens.append(Redactor(hook, tokenizer, mask_id=mask_of(tokenizer)))
        if not learning.learn_distributions:
            screens.append(lambda record: [tokens_only(record)])
        return BufferWriter(learning.learn, screens=screens, share=learning.learn_share)

    return serve(config, make_sink)
