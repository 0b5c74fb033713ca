"""Tokens of a target as llama.cpp reads them: byte-level BPE, with the name of the rule by which
llama.cpp splits a text before its merges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.errors import UserError

# Kinds of a token.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{END}|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{END}|"
)
REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The steps of a tokenizer.json before its merges -> llama.cpp's name of the same rule.
RULES: dict[tuple[str, ...], str] = {
    ("bytes by words",): "gpt-2",
    ("digits", "bytes by words"): "smollm",
    (ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + WORDS_AND_SPACES, "bytes"): "llama-bpe",
    (ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + WORDS_AND_SPACES, "bytes"): "qwen2",
    (
        ENGLISH
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        + r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        "bytes",
    ): "qwen35",
    (CASED.replace("{END}", "") + r"\p{N}|" + REST, "bytes"): "tekken",
    (CASED.replace("{END}", ENGLISH + "?") + r"\p{N}{1,3}|" + REST, "bytes"): "gpt-4o",
}
SPECIAL = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}


def vocabulary(folder: Path, size: int, *, trust_remote_code: bool) -> dict[str, Any]:
    """Metadata of the tokenizer of `folder`, filled up to the `size` rows of the embeddings."""
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    written = backend(tokenizer, folder)
    tokens, kinds = tokens_and_kinds(tokenizer, size)
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule_of(written, folder),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in written["model"]["merges"]
        ],
        **added_around(tokenizer),
    }
    for key, name in SPECIAL.items():
        if (token := getattr(tokenizer, f"{name}_token_id", None)) is not None:
            values[f"tokenizer.ggml.{key}_token_id"] = token
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        values["tokenizer.chat_template"] = template
    return values


def backend(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, Any]:
    """Contents of its tokenizer.json."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise refused(folder, type(tokenizer).__name__)
    return json.loads(inner.to_str())


def refused(folder: Path, found: str) -> UserError:
    return UserError(
        f"the tokenizer of {str(folder)!r} is no byte-level BPE that draftsmith writes to GGUF "
        f"({found}); convert the pair with llama.cpp's own convert_hf_to_gguf.py"
    )


def rule_of(written: dict[str, Any], folder: Path) -> str:
    model = written["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise refused(folder, f"model {model['type']} with bytes of its own")
    steps = written.get("pre_tokenizer") or {}
    listed = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    rule = tuple(step_name(step) for step in listed)
    if rule not in RULES:
        raise refused(folder, f"texts are split by {' then '.join(rule)}")
    return RULES[rule]


def step_name(step: dict[str, Any]) -> str:
    kind = step.get("type", "nothing")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "bytes by words" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return step["pattern"].get("Regex", kind)
    return kind


def tokens_and_kinds(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[list[str], list[int]]:
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    if (highest := max(by_id)) >= size:
        raise UserError(
            f"the tokenizer has a token of id {highest} and the model has {size} rows; restore "
            "the tokenizer's files"
        )
    added = tokenizer.added_tokens_decoder
    tokens, kinds = [], []
    for index in range(size):
        tokens.append(by_id.get(index, f"[PAD{index}]"))
        if index not in by_id:
            kinds.append(UNUSED)
        elif index not in added:
            kinds.append(NORMAL)
        else:
            kinds.append(CONTROL if added[index].special else USER_DEFINED)
    return tokens, kinds


def added_around(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Flags of the tokens that begin and end every text."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    begins = whole[: len(whole) - len(bare)] if whole[-len(bare) :] == bare else whole
    return {
        "tokenizer.ggml.add_bos_token": bool(begins) and begins[0] == tokenizer.bos_token_id,
        "tokenizer.ggml.add_eos_token": whole[-1] == tokenizer.eos_token_id,
    }
