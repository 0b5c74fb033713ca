"""Every kind of causal LM that the installed transformers has, at tiny size with random weights:
served beside another request and compared with the model alone.

`python -m tests.target_kinds` runs all of them and writes `target_kinds.json` and docs/targets.md;
with names of kinds, it prints their outcomes alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from tests.noise import spread
from tests.stand_in_drafts import Junk

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
TABLE = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "targets.md"
UNSERVED = ("refused", "not built")
VOCAB_SIZE = 96
MOST_PARAMETERS = 4_000_000
PROMPTS = ((5, 17, 40, 8, 3), (60, 2, 33, 71, 14, 9, 25, 44, 6, 51, 80, 19, 7))
NUM_TOKENS = 6
# The largest gap of the two best logits that rounding in another batch shape could turn round.
NOISE = 1e-4

# Values of every field of these names, in all kinds that have it.
TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "dim_model",
         "attention_hidden_size", "embedding_dim", "dim", "lru_width"), 32,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim",
         "encoder_ffn_dim", "dim_ff", "intermediate_dim", "mlp_hidden_size", "d_ff",
         "dense_intermediate_size"), 64,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "shared_intermediate_size", "moe_shared_expert_intermediate_size"), 32,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
         "encoder_layers"), 4,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
         "encoder_attention_heads"), 4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "d_kv"), 8),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length",
         "context_length", "seq_length"), 128,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4,
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2,
    ),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 6,
    "attention_chunk_size": 6, "floor_scale": 5,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "rotary_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "state_size": 8,
    "mamba_n_groups": 1, "n_groups": 1, "mamba_expand": 2,
}  # fmt: skip
# Where a kind needs more, or other values.
DECODER = {"is_decoder": True}
LATENT = {"num_key_value_heads": 4}
ZAMBA = {
    "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "num_key_value_heads": 4,
    "attention_hidden_size": 64, "attention_head_dim": 16,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
         "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
         "xlm-roberta", "xlm-roberta-xl", "xmod", "reformer"), DECODER,
    ),
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
         "glm_moe_dsa", "minicpm3", "youtu"), LATENT,
    ),
    "roc_bert": DECODER | {"pronunciation_vocab_size": 96, "shape_vocab_size": 96,
                           "pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "big_bird": DECODER | {"attention_type": "original_full"},
    "xmod": DECODER | {"languages": ["en_XX"], "default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "chunk_size": 8,
                   "num_hidden_layers": None},
    "mamba2": {"num_heads": 8, "chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_chunk_size": 8},
    "zamba2": ZAMBA | {"n_mamba_heads": 4, "chunk_size": 8, "adapter_rank": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 6},
    "bailing_hybrid": {"layer_group_size": 2, "num_key_value_heads": 4,
                       "layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": {"num_key_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4,
                    "layer_types": ["linear_attention", "full_attention"] * 2},
    "dots3_note_text": LATENT,
    "dots3_note": {"text_config": LATENT},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "sliding_window": None},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 64, "hidden_size": 32, "moe_num_experts": 4}},
    "phimoe": {"sliding_window": None,
               "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "doge": {"sliding_window": None},
    "reformer": DECODER | {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16]},
}  # fmt: skip


class Outcome(NamedTuple):
    status: str  # "served", "refused" or "not built"
    reason: str  # "" where it is served

    @property
    def is_served(self) -> bool:
        return self.status == "served"


class Wrong(Exception):
    """A kind that is served with another text than its own."""


def tiny_config(kind: str) -> PreTrainedConfig:
    return _tiny(CONFIG_MAPPING[kind], MORE.get(kind, {}))


def _tiny(kind: type[PreTrainedConfig], more: Mapping[str, Any]) -> PreTrainedConfig:
    fields = set(kind().to_dict()) | set(kind.attribute_map)
    values = {name: value for name, value in TINY.items() if name in fields}
    # One name of each field: an old name and its new one would both be read.
    values = {n: v for n, v in values.items() if kind.attribute_map.get(n) not in values}
    for name in kind.sub_configs:
        if isinstance(part := getattr(kind(), name, None), PreTrainedConfig):
            values[name] = _tiny(type(part), more.get(name, {})).to_dict()
    return kind(**{**values, **{n: v for n, v in more.items() if n not in kind.sub_configs}})


def build(kind: str, folder: Path) -> None:
    """Writes a tiny model. Raises whatever transformers raises for such a configuration."""
    config = tiny_config(kind)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the tiny configuration has {size:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    spread(model).save_pretrained(folder)
    words = WordLevel({str(token): token for token in range(VOCAB_SIZE)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)


def outcome_of(kind: str) -> Outcome:
    """Raises `Wrong`, and whatever reaches a user that is not a `UserError`."""
    with tempfile.TemporaryDirectory() as name, silence():
        folder = Path(name) / kind
        try:
            build(kind, folder)
        except Exception as error:
            return Outcome("not built", f"{type(error).__name__}: {_line(error)}")
        try:
            answers = serve(Target.load(folder, dtype=torch.float32))
        except UserError as error:
            return Outcome("refused", _reason(error))
        alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            check(alone, list(prompt), answer)
    return Outcome("served", "")


def serve(target: Target) -> list[list[int]]:
    """Greedy answers of both prompts together, with drafts."""
    config = EngineConfig(k=3, block_size=4, max_length=64, compile="off", max_round_tokens=16)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine = build_engine(target, Junk(), config)
    return [done.tokens for done in engine.generate([list(p) for p in PROMPTS], params)]


@torch.no_grad()
def check(alone: Any, prompt: list[int], answer: list[int]) -> None:
    """Raises `Wrong` at the first token that is not the best by more than rounding."""
    ids = torch.tensor([prompt + answer])
    logits = alone(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    gaps = logits.amax(dim=1) - chosen
    if len(answer) != NUM_TOKENS or bool((gaps > NOISE).any()):
        raise Wrong(f"its answer {answer} is {gaps.max():.3g} below its best tokens")


@contextlib.contextmanager
def silence() -> Iterator[None]:
    transformers_logging.disable_progress_bar()
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(50)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)


def _reason(error: UserError) -> str:
    """The refusal without the model's name and the advice to take another."""
    said = re.sub(r"^.*?cannot be (?:served|loaded):? ", "", str(error))
    return re.sub(r"; (use another|check the path).*$", "", said)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def write(outcomes: dict[str, Outcome]) -> None:
    table: dict[str, Any] = {"transformers": transformers.__version__}
    table["served"] = [kind for kind, outcome in outcomes.items() if outcome.is_served]
    for status in UNSERVED:
        table[status] = {k: one.reason for k, one in outcomes.items() if one.status == status}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    PAGE.write_text(page(*read()))


def read() -> tuple[str, dict[str, Outcome]]:
    """Version of transformers and the committed outcomes."""
    table = json.loads(TABLE.read_text())
    outcomes = {kind: Outcome("served", "") for kind in table["served"]}
    for status in UNSERVED:
        outcomes |= {kind: Outcome(status, reason) for kind, reason in table[status].items()}
    return table["transformers"], outcomes


def page(version: str, outcomes: dict[str, Outcome]) -> str:
    served, refused, absent = (
        [kind for kind, outcome in outcomes.items() if outcome.status == status]
        for status in ("served", "refused", "not built")
    )
    why: dict[str, list[str]] = {}
    for kind in refused:
        reason = re.split(r" \(|: |, so | <", outcomes[kind].reason.replace("|", "\\|"))[0].lstrip(
            "("
        )
        why.setdefault(reason or "it is no causal LM for transformers", []).append(kind)
    return "\n".join([
        "# Targets",
        "",
        f"Of the {len(outcomes)} kinds of causal LM in transformers {version}, {len(served)} are "
        f"served, {len(refused)} are refused and {len(absent)} could not be built at tiny size. "
        "`draftsmith doctor MODEL` says it of a model, with the whole reason.",
        "",
        "Each was tested as a tiny model with random weights (`python -m tests.target_kinds` writes "
        "this page): two requests at once, greedy, with drafts that are mostly wrong, against "
        "transformers over the whole text without a cache.",
        "",
        "## Served",
        "",
        ", ".join(f"`{kind}`" for kind in served),
        "",
        "## Refused",
        "",
        "| reason | kinds |",
        "|---|---|",
        *(f"| {reason} | {', '.join(f'`{kind}`' for kind in kinds)} |" for reason, kinds in why.items()),
        "",
        "## Not built",
        "",
        "By transformers, from the configuration of the test: "
        + ", ".join(f"`{kind}`" for kind in absent) + ".",
        "",
        "Image-text classes (Qwen-VL, Gemma 3, Llama 4, LLaVA and others) are served and trained for as the text models in them; images in a request are refused.",
        "",
    ])  # fmt: skip


def main(kinds: list[str]) -> None:
    outcomes = {}
    for kind in kinds or KINDS:
        begin = time.perf_counter()
        try:
            outcomes[kind] = outcome_of(kind)
        except Exception as error:
            if not kinds:
                raise
            outcomes[kind] = Outcome("WRONG", f"{type(error).__name__}: {_line(error)}")
        print(f"{time.perf_counter() - begin:.1f} s", kind, *outcomes[kind], flush=True)
    if not kinds:
        write(outcomes)


if __name__ == "__main__":
    main(sys.argv[1:])
