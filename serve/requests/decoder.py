"""Decoding of a few tokens without what transformers does around it, which takes longer."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.text_stream import Tokenizer


class FastDecoder:
    """`decode` of a tokenizer of the `tokenizers` library, for lists of ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer, self._decode = tokenizer, tokenizer.backend_tokenizer.decode

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        if not clean_up_tokenization_spaces:
            return self._decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=True
        )


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """`FastDecoder` where the tokenizer's class decodes by the library alone, else the
    tokenizer."""
    kind, fast = type(tokenizer), PreTrainedTokenizerFast
    if isinstance(tokenizer, fast) and (kind.decode, kind._decode) == (fast.decode, fast._decode):
        return FastDecoder(tokenizer)
    return tokenizer
