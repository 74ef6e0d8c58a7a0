"""Parse options of a reply."""

from __future__ import annotations

from dataclasses import dataclass

from agentcache.text.replies.calls import Tools
from agentcache.text.replies.format import HARMONY, ReplyFormat
from agentcache.text.replies.reader import ReplyReader, open_reader


@dataclass(frozen=True)
class Reading:
    """Parse options of a reply; by default, all is text.

    Args:
        tools: tools of the request; None to leave calls in the text.
        thoughts: separate reasoning from text.
        hides_thoughts: omit reasoning from the answer.
    """

    form: ReplyFormat = ReplyFormat()
    tools: Tools | None = None
    thoughts: bool = False
    hides_thoughts: bool = False

    @property
    def is_plain(self) -> bool:
        if self.form.dialect == HARMONY:
            return False
        return (self.tools is None or self.form.dialect is None) and not (self.thoughts and self.form.thoughts)

    def open(self, *, whole: bool = False) -> ReplyReader:
        return open_reader(self.form, self.tools, thoughts=self.thoughts, whole=whole)
