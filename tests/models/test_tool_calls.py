from __future__ import annotations

from pathlib import Path

import pytest

from agentcache.models.text.tokenizer import Tokenizer
from agentcache.models.text.tool_calls import ToolCall, ToolFormat
from tests.tokenizers_factory import CHATML, byte_bpe

CALLS = CHATML + "{% if tools %}<tool_call>{{ tool_call.name }}</tool_call>{% endif %}"


@pytest.mark.parametrize(("template", "expected"), [(CHATML, None), (None, None), (CALLS, "json_tools")])
def test_the_chat_template_tells_the_format(tmp_path: Path, template: str | None, expected: str | None) -> None:
    assert Tokenizer.load(byte_bpe(tmp_path, chat_template=template)).tool_format == expected


@pytest.mark.parametrize("arguments", ['{"x": 1}', '"{\\"x\\": 1}"'])
def test_arguments_are_an_object(arguments: str) -> None:
    text = f'{{"name": "f", "arguments": {arguments}}}'
    assert ToolFormat.named("json_tools").parse(text, []) == [ToolCall("f", {"x": 1})]


@pytest.mark.parametrize("text", ["", "f(x)", "{}", '{"name": "f"}', '{"name": "f", "arguments": [1]}', "[[1]]"])
def test_nonsense_is_no_call(text: str) -> None:
    with pytest.raises(ValueError, match="no tool call"):
        ToolFormat.named("json_tools").parse(text, [])


@pytest.mark.parametrize(
    "arguments",
    ["[" * 5000, '{"x": ' + "[" * 400 + "]" * 400 + "}", '{"x": NaN}', '{"x": 1e400}', r'{"x": "\ud800"}'],
    ids=["brackets", "nested", "nan", "infinite", "surrogate"],
)
def test_what_a_client_could_not_read_or_send_back_is_no_call(arguments: str) -> None:
    with pytest.raises(ValueError, match="no tool call"):
        ToolFormat.named("json_tools").parse(f'{{"name": "f", "arguments": {arguments}}}', [])


def test_a_call_that_is_no_json_in_python_is_json_to_clients() -> None:
    assert ToolFormat.named("pythonic").parse("[f(x=(1, 2))]", []) == [ToolCall("f", {"x": [1, 2]})]
