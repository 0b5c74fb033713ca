"""The README.md of an exported draft: what it is, what was measured, how to serve it; only what the
checkpoint itself says."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import join, quote
from typing import Any

import yaml
from huggingface_hub import EvalResult, metadata_load
from huggingface_hub.repocard_data import eval_results_to_model_index

from draftsmith.config import TARGET, build, command_line
from draftsmith.drafters.checkpoint import RECORD, draft_sampling_of
from draftsmith.errors import UserError
from draftsmith.files import markdown_table, with_interval
from draftsmith.train.config import TrainConfig
from draftsmith.train.data.mixture import provenances
from draftsmith.train.export.gguf import DRAFT
from draftsmith.train.export.gguf import TARGET as HELD
from draftsmith.train.export.openvino import TARGET as BESIDE
from draftsmith.train.export.serving import (
    SGLANG_ALGORITHMS,
    VLLM_METHODS,
    VLLM_SPECULATORS,
    genai_code,
    llama_command,
    sglang_command,
    vllm_command,
)
from draftsmith.train.export.source import ExportSource
from draftsmith.train.export.vllm_faults import SHARED_NOISE
from draftsmith.version import __version__

METHODS = {
    "eagle3": "an EAGLE-3 head: one decoder layer over three tapped hidden states of the target",
    "p-eagle": (
        "a P-EAGLE head: decoder layers over three tapped hidden states of the target that draft "
        "all tokens in one pass"
    ),
    "draft-lm": "a small causal LM with the target's vocabulary",
    "mtp": "a multi-token-prediction module over the target's last state",
    "eagle1": "an EAGLE-1 head: one decoder layer over the target's final state",
    "medusa": "Medusa heads on the target's final state",
    "dflash": "a DFlash block drafter: a few layers draft several tokens in one pass",
    "dspark": (
        "a DSpark block drafter: a DFlash block with a table of transitions between drafted tokens"
    ),
    "mlp": (
        "an MLP speculator: a small recurrent network over the target's final state and the "
        "drafted tokens"
    ),
}


CURVES, RESULTS = "curves.png", "results.png"  # plots beside the card
TASKS = 8  # rows of the table at most
PROBABILISTIC = (
    '`"draft_sample_method": "probabilistic"` draws drafts from the draft\'s distribution, as in '
    "training: vLLM's default drafts its likeliest token, of which less is accepted at a "
    "temperature above 0. "
)


def model_card(source: ExportSource, folder: Path, *, engine: str, repository: str | None) -> str:
    """The card of the export in `folder`, at most 60 lines. Plots, and the record, which holds all
    that is left out, lie beside it.

    Commands name target and draft where they lie, so that they run here; of a card for a
    `repository` of the Hub they name no place of this machine.
    """
    name, target = repository or source.out.name, shown_name(source.target_name)
    place = source.target_name if repository is None else target
    found, record = evaluations(source.metadata), source.metadata.get("training") or {}
    sections = [
        f"# {name}\nA draft for [speculative decoding](https://arxiv.org/abs/2211.17192) with "
        f"`{target}`: {METHODS[source.family]}. Speculation with it never changes the target's "
        f"output distribution, only its speed. Exported with draftsmith {__version__}, layout "
        f"{engine}.",
        "## Serving\n" + serving(source, place, repository or str(source.out), engine=engine),
        "## Measured acceptance\n" + measured(found, folder),
        "## Training\n" + training(record, folder, place),
    ]
    return "\n\n".join([front_matter(source, name, found), *sections]) + "\n"


def shown_name(name: str) -> str:
    """A Hub id as it is, and of a path the last part."""
    return name if is_hub_id(name) else Path(name).name


def front_matter(source: ExportSource, name: str, found: Sequence[dict[str, Any]]) -> str:
    """Fields that the Hub reads: tags, target, license, data sets and results."""
    values: dict[str, Any] = {
        "library_name": "transformers" if source.family == "draft-lm" else "draftsmith",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", source.family],
        **license_of(source.target),
    }
    if is_hub_id(source.target_name):
        values |= {"base_model": source.target_name}
    data = provenances((source.metadata.get("training") or {}).get("data") or {})
    prompts = dict.fromkeys(str(one.get("prompts", "")) for one in data)
    if datasets := [one for one in prompts if is_hub_id(one)]:
        values |= {"datasets": datasets}
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="prompts",
            dataset_name=", ".join(Path(part).name for part in one["data"].split()),
            metric_type="accepted-length",
            metric_name=f"tau, temperature {one['temperature']:g}, k = {one['k']}",
            metric_value=round(one["tau"]["value"], 3),
        )
        for one in found
        if isinstance(one.get("data"), str)
    ]
    if results:
        values |= {"model-index": eval_results_to_model_index(name, results)}
    # Inner lists and mappings on a line each.
    written = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=10_000)
    return f"---\n{written}---"


def license_of(target: Path) -> dict[str, str]:
    """Fields on the licence of the target, as its own card has them: weights made from it are bound
    by it, too."""
    card = target / "README.md"
    found = None
    with suppress(ValueError, yaml.YAMLError):
        found = metadata_load(card) if card.is_file() else None
    names = ("license", "license_name", "license_link")
    return {name: str(found[name]) for name in names if found and name in found}


def is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def evaluations(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The recorded evaluations, one a temperature."""
    return sorted(metadata.get("evaluation") or [], key=lambda one: one["temperature"])


def measured(found: list[dict[str, Any]], folder: Path) -> str:
    """tau by task, where there are several, and of all, with the plot that lies in `folder`."""
    if not found:
        return "Nothing was measured for this checkpoint. Run `draftsmith eval` and export again."
    tasks = list(dict.fromkeys(task for one in found for task in one.get("folders", {})))
    decoded = [one for one in found if "measured" in one]
    head = ["prompts", *(f"tau, {how(one)}" for one in found)]
    head += [f"tau decoded, {how(one)}" for one in decoded]
    rows = []
    for task in tasks[:TASKS]:
        parts = [one.get("folders", {}).get(task) for one in found]
        cells = ["-" if part is None else with_interval(**part["tau"]) for part in parts]
        rows.append([Path(task).name, *cells, *["-"] * len(decoded)])
    whole = [*found, *(one["measured"] for one in decoded)]
    if more := len(tasks[TASKS:]):
        rows.append([f"{more} more in `{RECORD}`", *["-"] * (len(head) - 1)])
    rows.append(["all", *(with_interval(**one["tau"]) for one in whole)])
    alphas = "; ".join(
        f"{how(one)}: "
        + " ".join("-" if alpha is None else f"{alpha['value']:.3f}" for alpha in one["alpha"])
        for one in found
    )
    lines = [
        *markdown_table(head, rows),
        "",
        f"tau: tokens per target forward with a chain of {max(one['k'] for one in found)} drafted "
        f"tokens, the target's own token included; {over(max(one['documents'] for one in found))}. "
        f"Method: {found[0]['method']}."
        + (" Decoded: counted in lossless decoding of held-out prompts." if decoded else ""),
        f"alpha_1, alpha_2, ...: probability that the i-th drafted token is kept, given that all "
        f"before it were. {alphas}.",
    ]
    return "\n".join(lines + picture_in(folder, RESULTS, "tau by task, alpha by position"))


def over(num_prompts: int) -> str:
    """Words on the prompts that figures are of."""
    if num_prompts > 1:
        return f"[ ]: 95 % interval over {num_prompts} prompts"
    return "of one prompt, without an interval (`draftsmith eval --store` measures more)"


def how(evaluation: dict[str, Any]) -> str:
    greedy = draft_sampling_of(evaluation) == "greedy" and evaluation["temperature"] > 0
    return f"T = {evaluation['temperature']:g}" + (", greedy drafts" if greedy else "")


def picture_in(folder: Path, name: str, what: str) -> list[str]:
    return [f"![{what}]({name})"] if (folder / name).is_file() else []


def training(record: dict[str, Any], folder: Path, target: str) -> str:
    if not record:
        return "The checkpoint carries no training record."
    lines = [f"{summary(record)}`{RECORD}` holds the whole record that the trainer left."]
    if command := command_of(record.get("config") or {}, target):
        lines += ["```sh", command, "```"]
    return "\n".join(lines + picture_in(folder, CURVES, "loss, alpha and tau while training"))


def command_of(values: dict[str, Any], target: str) -> str:
    """The command of a record of this version, with the names of its folders; else nothing."""
    try:
        return command_line("train", build(TrainConfig, without_places(values) | {TARGET: target}))
    except UserError:
        return ""


def without_places(value: Any) -> Any:
    """The value with every path in it cut down to its last part, and without addresses."""
    if isinstance(value, dict):
        return {key: without_places(one) for key, one in value.items() if "://" not in str(one)}
    if isinstance(value, list | tuple):
        return [without_places(one) for one in value]
    return shown_name(value) if isinstance(value, str) and "/" in value else value


def summary(record: dict[str, Any]) -> str:
    """Data and method in a sentence, from a record of `draftsmith train`; nothing from
    another's."""
    data = record.get("data") or {}
    divergence = (record.get("config") or {}).get("divergence", "forward-kl")
    begin = f"{divergence} from the target's distributions, {record.get('steps')} steps, on "
    if "folders" in data:
        named = (
            f"{entry['sequences']} texts of `{Path(entry['folder']).name}` (weight "
            f"{entry['weight']:g})"
            for entry in record.get("folders") or []
        )
        return f"{begin}{', '.join(named)}. "
    if not {"prompts", "answers", "tokens", "temperature"} <= data.keys() or "steps" not in record:
        return ""
    temperature = data["temperature"]
    given = temperature if isinstance(temperature, list) else [temperature]
    drawn = ", ".join(f"{one:g}" for one in given if one is not None)
    written = f"that the target wrote at temperature {drawn} to prompts from" if drawn else "of"
    return (
        f"{begin}{data['answers']} answers ({data['tokens']} tokens) {written} "
        f"`{shown_name(str(data['prompts']))}`. "
    )


def serving(source: ExportSource, target: str, draft: str, *, engine: str) -> str:
    k = source.num_speculative_tokens
    known = commands(source.family, engine, draft, target, k, stitched=source.is_stitched)
    lines = [f"# {title}\n{command}" for title, command in known]
    shown = ["\n".join(["```", *lines, "```"])]
    if "draft_sample_method" in shown[0]:
        shown.append(PROBABILISTIC + SHARED_NOISE.sentence(source.family) + ".")
    return "\n".join(shown)


def commands(
    family: str, engine: str, draft: str, target: str, k: int, *, stitched: bool = False
) -> list[tuple[str, str]]:
    """(engine, shell or Python lines) for every engine that reads this layout. `draft` is this
    folder or its Hub id."""
    words = ["draftsmith", "serve", target, "--draft", draft, "--k", str(k)]
    own = [("draftsmith", join(words))]
    if engine == "speculators" and family in VLLM_SPECULATORS:
        return [("vLLM (finds the target by itself)", f"vllm serve {quote(draft)}"), *own]
    if engine == "gguf":
        title = f"llama.cpp ({HELD} is the target, which --with-target writes here)"
        return [(title, llama_command(family, f"{draft}/{HELD}", f"{draft}/{DRAFT}", k))]
    if engine == "openvino":
        beside = f"{draft}/{BESIDE} is the target, which --with-target writes here"
        return [(f"OpenVINO GenAI ({beside})", genai_code(f"{draft}/{BESIDE}", draft, k))]
    if engine == "speculators" or (engine == "hf" and family != "draft-lm"):
        return own
    shown = []
    # The two take different EAGLE-1 files, and SGLang some MTP modules alone.
    if family in VLLM_METHODS and (family, engine) != ("eagle1", "sglang"):
        shown.append(
            (
                "vLLM up to 0.32" if family == "medusa" else "vLLM",
                vllm_command(family, target, draft, k, stitched=stitched),
            )
        )
    if family in SGLANG_ALGORITHMS and (family, engine) not in (
        ("eagle1", "vllm"),
        ("mtp", "vllm"),
    ):
        shown.append(("SGLang", sglang_command(family, target, draft, k, stitched=stitched)))
    if family == "draft-lm":
        shown.append(
            (
                "transformers",
                "target.generate(**inputs, "
                f'assistant_model=AutoModelForCausalLM.from_pretrained("{draft}"))',
            )
        )
    return shown + own
