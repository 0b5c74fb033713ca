"""Text that a chat template makes of a conversation, whatever form its author thought of."""

from __future__ import annotations

import pytest

from draftsmith.chats.template import rendered, template_takes
from draftsmith.errors import UserError
from tests.chat_templates import tokenizer_of, tooled

HEAD = "{% for message in messages %}{{ message.role }}:"


def test_a_developer_is_the_system_of_a_template_without_one() -> None:
    chat = [{"role": "developer", "content": "a"}]
    assert rendered(chat, tokenizer_of(HEAD + "{{ message.content }}{% endfor %}")) == "system:a"
    known = HEAD + "{{ message.content }}{% endfor %}{# developer #}"
    assert rendered(chat, tokenizer_of(known)) == "developer:a"


def test_content_is_parts_where_a_template_leaves_out_texts() -> None:
    source = HEAD + "{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert rendered([{"role": "user", "content": "a"}], tokenizer_of(source)) == "user:a"


def test_arguments_are_a_text_where_a_template_adds_them_to_one() -> None:
    calls = "{% for call in message.tool_calls %}{{ '' + call.function.arguments }}{% endfor %}"
    source = HEAD + calls + "{% endfor %}"
    text = rendered(tooled("", as_text=False), tokenizer_of(source))
    assert 'assistant:{"city": "BETACITY"}' in text


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{{ messages + 1 }}", "{{ messages[0].x.y }}", "{{ 1/0 }}"]
)  # fmt: skip
def test_whatever_a_template_raises_is_one_sentence(source: str) -> None:
    with pytest.raises(UserError, match=r"messages of row 3 are refused by the chat template"):
        rendered(
            [{"role": "user", "content": "a"}], tokenizer_of(source), where="messages of row 3"
        )


def test_a_variable_is_taken_by_a_statement_alone() -> None:
    assert template_takes("{% if enable_thinking %}x{% endif %}", "enable_thinking")
    assert not template_takes("{{ enable }} enable_thinking", "enable_thinking")
