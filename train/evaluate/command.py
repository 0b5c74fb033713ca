"""`draftsmith eval`: alpha_i and tau of a trained draft at each temperature, with 95 %
intervals."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.config import command_line, for_others
from draftsmith.drafters import checkpoint
from draftsmith.drafters.checkpoint import draft_sampling_of
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import TellsReads
from draftsmith.errors import UserError
from draftsmith.files import (
    as_values,
    markdown_table,
    page_of,
    with_interval,
    write_json,
    write_page,
)
from draftsmith.kernels.acceptance import DraftCost, bucket_of, label_of
from draftsmith.prompts.suites import read_suite
from draftsmith.train.config import EvalConfig, UnrollConfig
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.data.folders import folders_of
from draftsmith.train.data.mixture import Mixture, provenances, read_mixture
from draftsmith.train.evaluate.answers import answered, suite_texts, text_of
from draftsmith.train.evaluate.measured import prompt_of
from draftsmith.train.evaluate.picture import draw_figures
from draftsmith.train.evaluate.teacher_forced import (
    DraftRule,
    Estimate,
    Evaluation,
    count_documents,
    merge_documents,
    summarise,
    temperature_of,
)
from draftsmith.train.quiet import quiet

BySource = dict[str, list[TokenSequence]]

# Ties between tokens can go either way in another batch shape; more than this is text that someone
# else wrote.
UNLIKELY_LIMIT = 0.02
# For which engines the figures at a temperature above 0 hold.
DRAFTS = {
    "sampled": "for drafts drawn from the draft's distribution (draftsmith; vLLM's probabilistic "
    "drafts)",
    "greedy": "for greedy drafts (vLLM and SGLang unless set otherwise)",
}


def run(config: EvalConfig) -> int:
    """Evaluates by options that `start` has checked."""
    # Before minutes are spent on figures that could not be written.
    if config.store:
        checkpoint.read_metadata(config.draft)
    quiet()
    # In the precision that the target is served with, for exact figures.
    target = open_target(config)
    target.check_length(config.max_length, "option 'max_length'")
    drafter = checkpoint.load(config.draft, target)
    k = config.k or checkpoint.trained_k(config.draft) or UnrollConfig().steps
    texts = texts_of(config, target)
    found = [
        evaluate_at(config, temperature, target, drafter, own, k)
        for temperature, own in texts.items()
    ]
    cost = draft_cost(target, drafter)
    text = shown(config, found, cost)
    print(text)
    report(config, target, found, cost, text)
    return 0


def open_target(config: EvalConfig) -> Target:
    return load_target(
        config.target,
        dtype=config.dtype,
        max_length=config.max_length,
        offload=config.target_offload,
        use="step",
        trust_remote_code=config.trust_remote_code,
    )


class OfFolders(NamedTuple):
    """Figures at one temperature: over all texts, and of each folder by its path, or of each task
    of a suite."""

    whole: Evaluation
    by_folder: dict[str, Evaluation]


def texts_of(config: EvalConfig, target: Target) -> dict[float, BySource]:
    """Texts at each temperature, by task of a suite or by the path of their folder."""
    if config.suite is not None:
        suite = read_suite(config)
        print(f"suite {suite.about}", file=sys.stderr)
        return {
            temperature: suite_texts(config, temperature, target, suite.questions)
            for temperature in config.temperature
        }
    mixture = read_mixture(
        config.data, target, max_length=config.max_length, held_out_share=config.held_out
    )
    warn_of_trained_text(config, mixture)
    sequences = (mixture.held_out if len(mixture.held_out) else mixture.train).first(config.prompts)
    return {
        temperature: texts_at(config, temperature, target, mixture, sequences)
        for temperature in config.temperature
    }


def warn_of_trained_text(config: EvalConfig, mixture: Mixture) -> None:
    """A draft does better on text that it has seen."""
    training = checkpoint.training_of(config.draft)
    kept_back = training.get("config", {}).get("held_out", 1.0)
    # Of an export, without the folders.
    trained_on = for_others(provenances(training.get("data", {})))
    for folder, corpus in zip(mixture.folders, mixture.corpora):
        by_share = "held-out" not in corpus.train.pieces.splits
        if not len(corpus.held_out):
            print(
                f"nothing of {folder.path!r} is held out: drafts trained on it have seen the text "
                "evaluated here",
                file=sys.stderr,
            )
        elif (
            by_share and kept_back < config.held_out and for_others(corpus.provenance) in trained_on
        ):
            print(
                f"training kept back {kept_back:g} of {folder.path!r} and {config.held_out:g} of "
                f"it is evaluated: the draft has seen the rest; give --held-out {kept_back:g}",
                file=sys.stderr,
            )


def evaluate_at(
    config: EvalConfig, temperature: float, target: Target, drafter: Any, texts: BySource, k: int
) -> OfFolders:
    asked = DraftRule(temperature, k, config.draft_sampling)
    counts = {
        path: count_documents(
            drafter,
            target,
            own,
            asked,
            batch_size=config.batch_size,
            label=f"rounds of {Path(path).name} at T={temperature:g}",
        )
        for path, own in texts.items()
    }
    by_folder = {path: summarise(own, asked, seed=config.seed) for path, own in counts.items()}
    for path, evaluation in by_folder.items():
        if evaluation.unlikely > UNLIKELY_LIMIT:
            raise UserError(
                f"{evaluation.unlikely:.1%} of the text in {path!r} cannot be this target's at "
                f"temperature {temperature}; "
                "generate it with this target"
            )
    whole = merge_documents([one for own in counts.values() for one in own])
    return OfFolders(summarise(whole, asked, seed=config.seed), by_folder)


def texts_at(
    config: EvalConfig,
    temperature: float,
    target: Target,
    mixture: Mixture,
    sequences: list[TokenSequence],
) -> dict[str, list[TokenSequence]]:
    """The target's own texts at this temperature, by the path of the folder of their prompts:
    those that were written so, else new answers."""
    texts = {}
    for number, (folder, corpus) in enumerate(zip(mixture.folders, mixture.corpora)):
        asked = [one for one in sequences if one.folder == number]
        known = [temperature_of(one, corpus.provenance, target) == temperature for one in asked]
        own = [one for one, is_own in zip(asked, known) if is_own]
        others = [one for one, is_own in zip(asked, known) if not is_own]
        if others:
            own += answer_again(config, temperature, target, others)
        if own:
            texts[folder.path] = own
    return texts


def answer_again(
    config: EvalConfig, temperature: float, target: Target, sequences: list[TokenSequence]
) -> list[TokenSequence]:
    """The target's answers to the same prompts at another temperature."""
    prompts = [prompt_of(sequence).tolist() for sequence in sequences]
    answers = answered(config, temperature, target, prompts)
    return [
        text_of(sequence.name, prompt, answer)
        for sequence, prompt, answer in zip(sequences, prompts, answers, strict=True)
    ]


def draft_cost(target: Target, drafter: Any) -> DraftCost | None:
    """Cost in weights read; None of a draft whose proposals do not all read alike."""
    if not isinstance(drafter, TellsReads):
        return None
    whole = target.pass_bytes()
    return DraftCost(*(count / whole for count in drafter.read_bytes()))


def memory_bound(
    cost: DraftCost | None, evaluations: list[Evaluation]
) -> list[tuple[float, float | None]]:
    """(temperature, speed-up where time is the reading of weights) of each evaluation."""
    return [
        (one.temperature, None if cost is None else cost.memory_bound(one.tau.value, one.k))
        for one in evaluations
    ]


def shown(config: EvalConfig, found: list[OfFolders], cost: DraftCost | None) -> str:
    """The tables."""
    evaluations = [one.whole for one in found]
    by_source = source_table("folder" if config.suite is None else "task", found)
    lines = [by_source, *notes(evaluations)]
    if any(len(evaluation.by_context) > 1 for evaluation in evaluations):
        lines += ["", context_table(evaluations)]
    if cost is not None:
        at = ", ".join(f"{bound:.2f} at T={at:g}" for at, bound in memory_bound(cost, evaluations))
        lines.append(f"speed-up where reading weights takes all the time (MBSU): {at}")
    return "\n".join(lines)


def report(
    config: EvalConfig,
    target: Target,
    evaluated: list[OfFolders],
    cost: DraftCost | None,
    text: str,
) -> None:
    data = config.suite or " ".join(folder.path for folder in folders_of(config.data))
    bounds = [bound for _, bound in memory_bound(cost, [one.whole for one in evaluated])]
    found = [
        as_values(one.whole) | {"mbsu": bound, "data": data}
        for one, bound in zip(evaluated, bounds, strict=True)
    ]
    for one, of in zip(found, evaluated):
        if len(of.by_folder) > 1:
            one["folders"] = {path: as_values(own) for path, own in of.by_folder.items()}
    if config.out is not None:
        record = {
            "draft": config.draft,
            "target": target.name,
            "target_revision": target.revision,
            "evaluation": found,
        }
        write_json(config.out, record)
    if config.store:
        checkpoint.store_evaluation(Path(config.draft), found + other_figures(config))
    # Last: what is lost with a picture that fails is made again.
    if config.out is not None:
        command = command_line("eval", config)
        write_page(page_of(config.out), "eval", command, text, [partial(draw_figures, found)])


def other_figures(config: EvalConfig) -> list[dict[str, Any]]:
    """Stored figures at other temperatures, and of drafts that are drawn another way, which stay;
    at temperature 0 the way makes no difference."""
    return [
        one
        for one in checkpoint.read_metadata(config.draft).get("evaluation") or []
        if one["temperature"] not in config.temperature
        or (one["temperature"] > 0 and draft_sampling_of(one) != config.draft_sampling)
    ]


def notes(evaluations: list[Evaluation]) -> list[str]:
    """Lines below the table: what its figures hold for."""
    is_sampled = any(one.temperature > 0 for one in evaluations)
    return [
        f"{evaluations[0].k} drafted tokens per round",
        *([DRAFTS[evaluations[0].draft_sampling]] if is_sampled else []),
    ]


def context_table(evaluations: list[Evaluation]) -> str:
    """tau and alpha_1 of the rounds that begin in each bucket of context lengths."""
    rows = [
        (
            f"{evaluation.temperature:g}",
            label_of(bucket_of(one.begin)),
            _cell(one.tau, 2),
            _cell(one.alpha[0], 3),
            str(one.documents),
            f"{one.rounds:.0f}",
        )
        for evaluation in evaluations
        for one in evaluation.by_context
    ]
    head = ("T", "context", "tau", "alpha_1", "documents", "rounds")
    return "\n".join(markdown_table(head, rows))


def source_table(source: str, found: list[OfFolders]) -> str:
    """Rows of all texts, and by folder or task where there are several."""
    rows = [
        (
            f"{own.temperature:g}",
            name,
            *map(str, (own.documents, own.tokens)),
            _cell(own.tau, 2),
            *(_cell(alpha, 3) for alpha in own.alpha),
        )
        for one in found
        for name, own in (*one.by_folder.items(), ("all", one.whole))
        if name == "all" or len(one.by_folder) > 1
    ]
    depths = (f"alpha_{at}" for at in range(1, len(found[0].whole.alpha) + 1))
    prompts = "questions" if source == "task" else "prompts"
    head = ("T", source, prompts, "tokens", "tau", *depths)
    return "\n".join(markdown_table(head, rows))


def _cell(estimate: Estimate | None, digits: int) -> str:
    return "-" if estimate is None else with_interval(*estimate, digits=digits)
