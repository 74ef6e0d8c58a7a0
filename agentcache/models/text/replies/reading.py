"""What to look for in a reply, for all who read it: the server, its stop strings, the offline face."""

from __future__ import annotations

from dataclasses import dataclass

from agentcache.models.text.replies.calls import Tools
from agentcache.models.text.replies.format import HARMONY, ReplyFormat
from agentcache.models.text.replies.reader import ReplyReader, open_reader


@dataclass(frozen=True)
class Reading:
    """What to look for in a reply; without arguments, nothing: all of it is text.

    Args:
        form: how the model writes.
        tools: the request's; None where calls are left in the text.
        thoughts: whether thoughts are told from text.
        hides_thoughts: whether they are left out of the answer.
    """

    form: ReplyFormat = ReplyFormat()
    tools: Tools | None = None
    thoughts: bool = False
    hides_thoughts: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all of a reply is text."""
        if self.form.dialect == HARMONY:
            return False
        return (self.tools is None or self.form.dialect is None) and not (self.thoughts and self.form.thoughts)

    def open(self, *, whole: bool = False) -> ReplyReader:
        """A reader for one reply.

        Args:
            whole: whether its events are used only when all of them are known, not streamed.
        """
        return open_reader(self.form, self.tools, thoughts=self.thoughts, whole=whole)
