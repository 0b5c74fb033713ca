"""The README.md of an exported draft: what it is, what was measured, how to serve it; only what the
checkpoint itself says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from draftsmith.drafters.checkpoint import RECORD, draft_sampling_of
from draftsmith.files import markdown_table
from draftsmith.train.export.gguf import DRAFT, TARGET
from draftsmith.train.export.openvino import TARGET as BESIDE
from draftsmith.train.export.serving import (
    SGLANG_ALGORITHMS,
    VLLM_GREEDY,
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


PROBABILISTIC = (
    '`"draft_sample_method": "probabilistic"` draws drafts from the draft\'s distribution, as in '
    "training: vLLM's default drafts its likeliest token, of which less is accepted at a "
    "temperature above 0. "
)


def model_card(source: ExportSource, *, engine: str, name: str) -> str:
    found = evaluations(source.metadata)
    sections = [
        front_matter(source, name, found),
        f"# {name}\n\nA draft for [speculative decoding](https://arxiv.org/abs/2211.17192) with "
        f"`{source.target_name}`: "
        f"{METHODS[source.family]}. Speculation with it never changes the target's "
        "output distribution, only its speed.\n\n"
        f"Exported with draftsmith {__version__}, layout {engine}.",
        "## Serving\n\n" + serving(source, engine=engine, name=name),
        "## Measured acceptance\n\n" + measured(found),
        *by_task(found),
        "## Training\n\n" + training(source.metadata.get("training") or {}),
    ]
    return "\n\n".join(sections) + "\n"


def front_matter(source: ExportSource, name: str, found: Sequence[dict[str, Any]]) -> str:
    """Fields that the Hub reads: tags, target, data sets and results."""
    values: dict[str, Any] = {
        "library_name": "transformers" if source.family == "draft-lm" else "draftsmith",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", source.family],
    }
    if is_hub_id(source.target_name):
        values |= {"base_model": source.target_name}
    data = (source.metadata.get("training") or {}).get("data") or {}
    prompts = data.get("prompts")
    if isinstance(prompts, str) and is_hub_id(prompts):
        values |= {"datasets": [prompts]}
    results = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": Path(one["data"]).name, "type": "prompts"},
            "metrics": [
                {
                    "type": "accepted-length",
                    "name": f"tau, temperature {one['temperature']:g}, k = {one['k']}",
                    "value": round(one["tau"]["value"], 3),
                }
            ],
        }
        for one in found
        if isinstance(one.get("data"), str)
    ]
    if results:
        values |= {"model-index": [{"name": name, "results": results}]}
    return "---\n" + yaml.safe_dump(values, sort_keys=False) + "---"


def is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def evaluations(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The recorded evaluations, one a temperature."""
    return sorted(
        metadata.get("evaluation") or [], key=lambda evaluation: evaluation["temperature"]
    )


def measured(found: list[dict[str, Any]]) -> str:
    if not found:
        return "Nothing was measured for this checkpoint. Run `draftsmith eval` and export again."
    k = max(evaluation["k"] for evaluation in found)
    decoded = any("measured" in evaluation for evaluation in found)
    head = [
        "temperature",
        "tau (95 %)",
        *(["tau decoded (95 %)"] if decoded else []),
        *(f"alpha_{i + 1}" for i in range(k)),
        "tokens",
    ]
    rows = []
    for evaluation in found:
        alphas = [*evaluation["alpha"], *[None] * (k - len(evaluation["alpha"]))]
        taus = [interval(evaluation["tau"])]
        if decoded:
            taus.append(
                interval(evaluation["measured"]["tau"]) if "measured" in evaluation else "-"
            )
        cells = ["-" if alpha is None else f"{alpha['value']:.3f}" for alpha in alphas]
        is_greedy = draft_sampling_of(evaluation) == "greedy" and evaluation["temperature"] > 0
        drafts = ", greedy drafts" if is_greedy else ""
        rows.append(
            [f"{evaluation['temperature']:g}{drafts}", *taus, *cells, str(evaluation["tokens"])]
        )
    explanation = (
        f"tau: tokens per target forward with a chain of {k} drafted tokens, the target's own "
        "token included. "
        "alpha_i: probability that the i-th drafted token is kept, given that all before it were. "
        f"Method: {found[0]['method']}."
    )
    if decoded:
        explanation += " Decoded: counted in lossless decoding of held-out prompts."
    return "\n".join([*markdown_table(head, rows), "", explanation])


def by_task(found: Sequence[dict[str, Any]]) -> list[str]:
    """The table of tau by task or data folder, where there are several."""
    parts = {f"{one['temperature']:g}": one["folders"] for one in found if "folders" in one}
    tasks = list(dict.fromkeys(task for part in parts.values() for task in part))
    if not tasks:
        return []
    head = ["prompts", *(f"tau, temperature {temperature}" for temperature in parts)]
    rows = []
    for task in tasks:
        taus = [interval(part[task]["tau"]) if task in part else "-" for part in parts.values()]
        rows.append([Path(task).name, *taus])
    return ["\n".join(markdown_table(head, rows))]


def interval(tau: dict[str, float]) -> str:
    return f"{tau['value']:.2f} ({tau['low']:.2f} to {tau['high']:.2f})"


def training(record: dict[str, Any]) -> str:
    if not record:
        return "The checkpoint carries no training record."
    return f"{summary(record)}`{RECORD}` holds the whole record that the trainer left."


def summary(record: dict[str, Any]) -> str:
    """Data and method in a sentence, from a record of `draftsmith train`; nothing from
    another's."""
    data = record.get("data") or {}
    if "folders" in data:
        return several_folders(record)
    if not {"prompts", "answers", "tokens", "temperature"} <= data.keys() or "steps" not in record:
        return ""
    config, temperature = record.get("config") or {}, data["temperature"]
    given = temperature if isinstance(temperature, list) else [temperature]
    shown = ", ".join(f"{one:g}" for one in given)
    return (
        f"{config.get('divergence', 'forward-kl')} from the target's distributions, "
        f"{record['steps']} steps, on {data['answers']} answers "
        f"({data['tokens']} tokens) that the target wrote at temperature {shown} "
        "to prompts from "
        f"`{data['prompts']}`. "
    )


def several_folders(record: dict[str, Any]) -> str:
    named = ", ".join(
        f"{entry['sequences']} texts of `{entry['folder']}` (weight {entry['weight']:g})"
        for entry in record.get("folders") or []
    )
    divergence = (record.get("config") or {}).get("divergence", "forward-kl")
    return f"{divergence} from the target's distributions, {record['steps']} steps, on {named}. "


def serving(source: ExportSource, *, engine: str, name: str) -> str:
    k, target = source.num_speculative_tokens, source.target_name
    shown = [
        f"{title}:\n\n```\n{command}\n```"
        for title, command in commands(
            source.family, engine, name, target, k, stitched=source.is_stitched
        )
    ]
    in_triton = engine == "triton" and source.family not in VLLM_GREEDY
    if in_triton or any("draft_sample_method" in one for one in shown):
        shown.append(PROBABILISTIC + SHARED_NOISE.sentence(source.family) + ".")
    return "\n\n".join(shown)


def commands(
    family: str, engine: str, draft: str, target: str, k: int, *, stitched: bool = False
) -> list[tuple[str, str]]:
    """(engine, shell or Python lines) for every engine that reads this layout. `draft` is this
    folder or its Hub id."""
    if engine == "triton":
        return [("NVIDIA Triton with its vLLM backend", f"tritonserver --model-repository {draft}")]
    if engine == "speculators" and family in VLLM_SPECULATORS:
        return [("vLLM (finds the target by itself)", f"vllm serve {draft}")]
    if engine == "gguf":
        title = f"llama.cpp (`{TARGET}` is the target, which `--with-target` writes here)"
        return [(title, llama_command(family, TARGET, f"{draft}/{DRAFT}", k))]
    if engine == "openvino":
        beside = f"`{draft}/{BESIDE}` is the target, which `--with-target` writes here"
        return [(f"OpenVINO GenAI ({beside})", genai_code(f"{draft}/{BESIDE}", draft, k))]
    if engine == "speculators" or (engine == "hf" and family != "draft-lm"):
        return [("draftsmith", f"draftsmith serve --target {target} --draft {draft} --k {k}")]
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
    return shown
