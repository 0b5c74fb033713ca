"""Start of `draftsmith eval`: wrong options are an error at once, before torch and transformers,
which take seconds to import."""

from __future__ import annotations

from draftsmith.config import check_limits
from draftsmith.drafters.layouts.hub import check_named
from draftsmith.errors import UserError
from draftsmith.files import check_result
from draftsmith.progress import loading
from draftsmith.prompts.suites import check_suite
from draftsmith.train.config import EvalConfig
from draftsmith.train.data.folders import check_folders, folders_of


def run(config: EvalConfig) -> int:
    check_options(config)
    check_folders(config.data)
    check_result(config.out, "out")
    check_named(config)
    with loading():
        from draftsmith.train.evaluate.command import run as evaluate

    return evaluate(config)


def check_options(config: EvalConfig) -> None:
    check_limits(config)
    check_suite(config, ("data", "prompts", "held_out"))
    if config.suite is None:
        if not config.data:
            raise UserError("option 'data' is not given; give folders of data, or a suite")
        folders_of(config.data)
