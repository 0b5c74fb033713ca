"""The benchmark of long contexts: its bytes, its texts, its table."""

from __future__ import annotations

from scripts.bench.drafters import long


def test_a_token_is_a_byte() -> None:
    text = bytes(range(256)).decode("latin-1") + "def f():\n\treturn 'é'\n"
    tokenizer = long.tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_texts_are_pieces_that_the_seed_gives() -> None:
    text = b"".join(number.to_bytes(2, "big") for number in range(500))
    found = long.pieces(text, [3, 100], seed=4)
    assert [len(one) for one in found] == [3, 100]
    assert all(bytes(one) in text for one in found)
    assert found == long.pieces(text, [3, 100], seed=4) != long.pieces(text, [3, 100], seed=5)


def test_held_out_modules_are_not_trained_on() -> None:
    train, held_out = long.documents(0)
    assert len(train) > 5 * len(held_out) > 500_000
    assert held_out[5000:5400] not in train
    assert long.documents(1)[1] != held_out == long.documents(0)[1]


def test_the_table_says_how_tau_holds() -> None:
    def row(length: int, value: float) -> dict:
        tau = {"value": value, "low": value - 0.1, "high": value + 0.1}
        return {"length": length, "target_loss": 2.0, "drafts": {"one": {"tau": tau}}}

    table = long.table({"train_s": {"one": 3.0}, "lengths": [row(256, 2.0), row(512, 1.5)]})
    assert table.splitlines()[2:] == [
        "| 128 | 2.00 | 2.00 (1.90 to 2.10), 1.00 |",
        "| 384 | 2.00 | 1.50 (1.40 to 1.60), 0.75 |",
    ]
