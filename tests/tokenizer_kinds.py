"""Small tokenizers of every kind of decoder."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["for x in range(10): print(x)", "the stop word is END here"] * 4, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


LETTERS = "aEND exly日é"
BYTES = {f"<0x{number:02X}>": number for number in range(256)}


def byte_fallback(*, strips: bool) -> PreTrainedTokenizerFast:
    """Of the kind of Llama 2 and Mistral, which strip a leading space, or of Gemma."""
    pieces = ["▁", "▁a", "EN", "\ufffd", *dict.fromkeys(LETTERS.replace(" ", ""))]
    vocabulary = {piece: number for number, piece in enumerate(["<eos>", *BYTES, *pieces])}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("E", "N")], byte_fallback=True, fuse_unk=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if strips else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def by_words(kind: str) -> PreTrainedTokenizerFast:
    """Tokenizers whose decoders put or drop spaces: of T5, of BERT, of the first GPT."""
    words = ["a", "END", "dim", "x"]
    pieces = {
        "metaspace": [form for word in words for form in (word, f"▁{word}")] + ["▁"],
        "wordpiece": [form for word in words for form in (word, f"##{word}")],
        "suffix": [form for word in words for form in (word, f"{word}</w>")] + ["</w>"],
    }[kind]
    vocabulary = {piece: number for number, piece in enumerate(["<eos>", *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.decoder = {
        "metaspace": decoders.Metaspace(),
        "wordpiece": decoders.WordPiece(cleanup=False),
        "suffix": decoders.BPEDecoder(),
    }[kind]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZER = byte_level()
FALLBACKS = {"llama": byte_fallback(strips=True), "gemma": byte_fallback(strips=False)}
WORDS = {kind: by_words(kind) for kind in ("metaspace", "wordpiece", "suffix")}
ALL = {"byte level": TOKENIZER} | FALLBACKS | WORDS
