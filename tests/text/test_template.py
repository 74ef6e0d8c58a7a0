"""Chat templates in a process of their own: what transformers would write, and limits that hold."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from agentcache.compat import renders_by_code
from agentcache.errors import ContextLengthExceeded, InvalidRequest, Overloaded, UnsupportedModel
from agentcache.text.tokenizer import Tokenizer
from agentcache.text.work_limit import WorkLimit
from tests.marks import slow
from tests.rounds import in_rounds, within
from tests.text.templates import CONVERSATIONS, TEMPLATES, TOOLS
from tests.text.tokenizing import user
from tests.tokenizers_factory import byte_bpe, byte_bpe_bos

# Of CPU time, 2 s; a busy machine gives them out more slowly.
TIME_LIMIT = 8.0


def made(folder: Path, template: Any) -> Tokenizer:
    return Tokenizer.load(byte_bpe_bos(folder, chat_template=template))


def refusal(tokenizer: Tokenizer, limit: WorkLimit | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        tokenizer.chats.render(user("x"), limit=limit or WorkLimit())
    return refused.value


class TestAsTransformersDoes:
    @pytest.mark.parametrize("conversation", CONVERSATIONS)
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_the_same_text(self, tmp_path_factory: pytest.TempPathFactory, name: str, conversation: str) -> None:
        tokenizer = _known(tmp_path_factory, name)
        messages = CONVERSATIONS[conversation]
        for tools in (None, TOOLS):
            for options in ({}, {"enable_thinking": False}, {"enable_thinking": True, "bos_token": "<b>"}):
                for prompted in (False, True):
                    expected = _by_transformers(tokenizer, messages, tools, prompted, options)
                    assert _ours(tokenizer, messages, tools, prompted, options) == expected

    def test_a_template_for_tools_is_taken_where_there_are_tools(self, tmp_path: Path) -> None:
        templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        tokenizer = made(tmp_path, templates)
        assert tokenizer.chats.text(user("x")) == "plain"
        assert tokenizer.chats.text(user("x"), TOOLS) == "tools"
        assert made(tmp_path, [{"name": "other", "template": "x"}]).chats.text(user("x")) == "x"

    def test_what_a_sandbox_forbids(self, tmp_path: Path) -> None:
        for index, template in enumerate(["{{ ''.__class__.__mro__ }}", "{{ namespace(_x=1) }}"]):
            tokenizer = made(tmp_path / str(index), template)
            theirs = _by_transformers(tokenizer, user("x"), None, True, {})
            assert _ours(tokenizer, user("x"), None, True, {}) == theirs

    def test_code_of_a_library_is_no_data_of_the_folder(self, tmp_path: Path) -> None:
        tokenizer = made(tmp_path, "{{ messages }}")
        assert not renders_by_code(tokenizer._wrapper)
        tokenizer._wrapper._chat_template = lambda *arguments, **options: "code"
        assert renders_by_code(tokenizer._wrapper)
        assert Tokenizer(tokenizer._wrapper).chats.text(user("x")) == "code"

    def test_what_is_no_data(self, chatml: Tokenizer) -> None:
        with pytest.raises(InvalidRequest, match="JSON values"):
            chatml.chats.render(user("x"), template_kwargs={"when": object()})


LOOPS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{% set n = messages | length + 8 %}{{ (n ** 9999999) > 1 }}",
}
GREEDY = {
    "a constant": "{{ 'x' * 10 ** 10 }}",
    "a product": "{% set n = messages | length * 10 ** 9 %}{{ ('x' * n) | length }}",
    "doubling": "{% set ns = namespace(x='xyz') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a list": "{{ ([0] * 10 ** 9) | length }}",
}


class TestLimits:
    @pytest.mark.parametrize("template", [slow(LOOPS["nested loops"]), slow(LOOPS["power"])], ids=["loops", "power"])
    @in_rounds
    def test_a_template_that_takes_too_long(self, tmp_path: Path, template: str) -> None:
        tokenizer = made(tmp_path, template)
        with within(TIME_LIMIT):
            error = refusal(tokenizer)
        assert (error.param, error.code) == ("messages", "template_failed")
        assert "longer than 2 s" in error.message

    @pytest.mark.parametrize("template", GREEDY.values(), ids=GREEDY)
    def test_a_template_that_takes_too_much_memory(self, tmp_path: Path, template: str) -> None:
        assert "more memory than 96 MB" in refusal(made(tmp_path, template)).message

    @pytest.mark.slow
    def test_the_next_render_works(self, tmp_path: Path) -> None:
        template = (
            "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
            "{% endfor %}{% endfor %}{% elif messages[0].content == 'eat' %}{{ 'x' * messages | length * 10 ** 10 }}"
            "{% endif %}{{ messages[0].content }}"
        )
        tokenizer = made(tmp_path, template)
        for bad in ("eat", "loop"):
            assert tokenizer.chats.text(user("hi")) == "hi"
            with pytest.raises(InvalidRequest):
                tokenizer.chats.text(user(bad))
            assert tokenizer.chats.text(user("hi")) == "hi"

    @in_rounds
    def test_who_leaves_ends_it_at_once(self, tmp_path: Path) -> None:
        tokenizer = made(tmp_path, LOOPS["nested loops"])
        left = threading.Event()
        threading.Timer(0.3, left.set).start()
        with within(1.5), pytest.raises(Overloaded):
            tokenizer.chats.render(user("x"), limit=WorkLimit(has_ended=left.is_set))
        assert tokenizer.chats._template._work._idle == []

    def test_an_output_that_no_context_holds(self, tmp_path: Path) -> None:
        tokenizer = made(tmp_path, "{{ 'hello ' * 1000000 }}")

        def refuse(at_least: int) -> None:
            raise ContextLengthExceeded(f"at least {at_least}")

        with pytest.raises(ContextLengthExceeded, match="at least"):
            tokenizer.chats.render(user("x"), limit=WorkLimit(100, refuse))
        assert len(tokenizer.chats.text(user("x"))) == 6_000_000

    def test_an_output_that_nothing_holds(self, tmp_path: Path) -> None:
        tokenizer = made(tmp_path, "{% for i in range(99000) %}{{ messages[0].content }}{% endfor %}")
        with pytest.raises((ContextLengthExceeded, InvalidRequest)):
            tokenizer.chats.text(user("x" * 10_000))

    def test_renders_at_the_same_time(self, tmp_path: Path) -> None:
        tokenizer = made(tmp_path, "{% for i in range(20000) %}{% endfor %}{{ messages[0].content }}")
        found: dict[int, str] = {}

        def render(number: int) -> None:
            for turn in range(10):
                found[number] = tokenizer.chats.text(user(f"{number} {turn}"))

        threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {number: f"{number} 9" for number in range(4)}
        assert 1 <= len(tokenizer.chats._template._work._idle) <= 4

    def test_a_child_that_goes_in_the_middle_is_replaced(self, tmp_path: Path) -> None:
        tokenizer = made(tmp_path, "{{ messages[0].content }}")
        assert tokenizer.chats.text(user("a")) == "a"
        child = tokenizer.chats._template._work._idle[0]._process
        child.send_signal(signal.SIGSTOP)  # it is there, and does nothing
        killing = threading.Timer(0.1, child.kill)
        killing.start()
        assert "broke off" in refusal(tokenizer).message
        killing.join()
        assert tokenizer.chats.text(user("b")) == "b"


@pytest.mark.usefixtures("own_children")
class TestProcesses:
    def test_they_end_with_the_tokenizer(self, tmp_path: Path) -> None:
        tokenizer = made(tmp_path, "x")
        tokenizer.start()
        [child] = tokenizer.chats._template._work._idle
        assert child._process.poll() is None
        tokenizer.close()
        assert child._process.poll() is not None
        assert tokenizer.chats.text(user("x")) == "x"
        [child] = tokenizer.chats._template._work._idle
        process: subprocess.Popen[bytes] = child._process
        del tokenizer, child
        assert process.wait(60) is not None

    def test_they_end_with_the_process_that_asks_them(self, tmp_path: Path) -> None:
        """However it ends: its end of the socket is closed then. Signals to all of a service's processes do nothing."""
        tokenizer = made(tmp_path, "x")
        assert tokenizer.chats.text(user("x")) == "x"
        [child] = tokenizer.chats._template._work._idle
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            child._process.send_signal(number)
        assert tokenizer.chats.text(user("x")) == "x"
        child._socket.close()
        assert child._process.wait(60) == 0

    def test_what_they_import(self, tmp_path: Path) -> None:
        """Nothing that is large: a process starts quickly and stays small."""
        tokenizer = made(tmp_path, "x")
        tokenizer.start()
        assert tokenizer.chats.text(user("x")) == "x"
        status = Path(f"/proc/{tokenizer.chats._template._work._idle[0]._process.pid}/status")
        if status.exists():
            [line] = [line for line in status.read_text().splitlines() if line.startswith("VmRSS")]
            assert int(line.split()[1]) < 40_000

    def test_a_template_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="cannot be read"):
            made(tmp_path, "{% for %}").chats.text(user("x"))


_MADE: dict[str, Tokenizer] = {}


def _known(factory: pytest.TempPathFactory, name: str) -> Tokenizer:
    if name not in _MADE:
        _MADE[name] = Tokenizer.load(byte_bpe(factory.mktemp("template"), chat_template=TEMPLATES[name]))
    return _MADE[name]


def _ours(tokenizer: Tokenizer, messages: Any, tools: Any, prompted: bool, options: Any) -> str:
    try:
        return tokenizer.chats._render(
            messages, tools, {}, add_generation_prompt=prompted, template_kwargs=options, limit=WorkLimit()
        )
    except InvalidRequest as error:
        return error.message


def _by_transformers(tokenizer: Tokenizer, messages: Any, tools: Any, prompted: bool, options: Any) -> str:
    """Through mlx-lm's wrapper, as its server does it; a refusal as we word it."""
    try:
        return str(
            tokenizer._wrapper.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompted, tokenize=False, **options
            )
        )
    except Exception as error:
        return f"The model's chat template refuses these messages: {error}"


def test_a_process_that_somebody_has_ended_meanwhile_costs_nobody_anything(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, "{{ messages[0].content }}")
    assert tokenizer.chats.text(user("one")) == "one"
    [process] = tokenizer.chats._template._work._idle
    process._process.kill()
    process._process.wait()
    assert tokenizer.chats.text(user("two")) == "two"
    tokenizer.close()
