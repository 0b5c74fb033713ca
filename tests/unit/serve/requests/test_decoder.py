"""The fast decoder has the tokenizer's texts, and a tokenizer with a way of its own keeps it."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftsmith.serve.requests.input_processor import FastDecoder, decoder_of
from scripts.paths import ROOT


def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(ROOT / "scripts" / "quickstart_target")


def test_texts_are_the_tokenizers() -> None:
    own = tokenizer()
    fast = decoder_of(own)
    assert isinstance(fast, FastDecoder)
    for text in ("def f(x):\n    return x , 1 .", "\u4f60\u597d \U0001f600", " a", ""):
        ids = [own.all_special_ids[0], *own(text)["input_ids"], own.all_special_ids[-1]]
        for skip in (True, False):
            for clean in (True, False):
                ways = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": clean}
                for end in range(1, len(ids) + 1):
                    assert fast.decode(ids[:end], **ways) == own.decode(ids[:end], **ways)


def test_a_class_that_decodes_otherwise_is_left_alone() -> None:
    class Upper(PreTrainedTokenizerFast):
        def _decode(self, *arguments, **options) -> str:
            return super()._decode(*arguments, **options).upper()

    own = Upper(tokenizer_object=tokenizer().backend_tokenizer)
    assert decoder_of(own) is own
