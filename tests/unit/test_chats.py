"""Text that a chat template makes of a conversation, whatever form its author thought of."""

from __future__ import annotations

from draftsmith.chats import rendered, template_takes
from tests.chat_templates import tokenizer_of

HEAD = "{% for message in messages %}{{ message.role }}:"


def test_a_developer_is_the_system_of_a_template_without_one() -> None:
    chat = [{"role": "developer", "content": "a"}]
    assert rendered(chat, tokenizer_of(HEAD + "{{ message.content }}{% endfor %}")) == "system:a"
    known = HEAD + "{{ message.content }}{% endfor %}{# developer #}"
    assert rendered(chat, tokenizer_of(known)) == "developer:a"


def test_a_variable_is_taken_by_a_statement_alone() -> None:
    assert template_takes("{% if enable_thinking %}x{% endif %}", "enable_thinking")
    assert not template_takes("{{ enable }} enable_thinking", "enable_thinking")
