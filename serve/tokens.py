"""Prompts of API requests as token ids."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from draftsmith.errors import UserError


def completion_prompts(
    prompt: str | list[str] | list[int] | list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """One prompt or several, as text or as ids."""
    if isinstance(prompt, str):
        return [_encode(prompt, tokenizer)]
    if not prompt:
        raise UserError("prompt is an empty list; give a text or token ids")
    if isinstance(prompt[0], int):
        return [list(prompt)]  # type: ignore[list-item]
    return [_encode(item, tokenizer) if isinstance(item, str) else list(item) for item in prompt]  # type: ignore[arg-type]


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def chat_prompt(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template is None:
        raise UserError("this model's tokenizer has no chat template; use /v1/completions")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        # Templates are programs of their own and raise what they like, mostly about the order of roles.
        raise UserError(f"the chat template refuses these messages ({error}); mend them") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
