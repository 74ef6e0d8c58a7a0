"""Errors that agentcache raises on purpose."""

from __future__ import annotations


class AgentCacheError(Exception):
    """Base of all errors raised on purpose."""


class RequestError(AgentCacheError):
    """The caller's fault. `param`: such as ``messages[1].role``; `code`: for programs."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code


class InvalidRequest(RequestError):
    """Malformed or contradictory input."""


class ContextLengthExceeded(RequestError):
    """Prompt longer than the model's context."""

    code = "context_length_exceeded"


class UnsupportedAdapter(RequestError):
    code = "adapter_unsupported"


class UnreadableAdapter(UnsupportedAdapter):
    pass


class UnsupportedPolicy(RequestError):
    """Model or adapter cannot share its cache in that way."""

    code = "policy_unsupported"


class Unauthorized(RequestError):
    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class NotFound(RequestError):
    """No agent, model or adapter has this name."""

    status = 404
    code = "not_found"
    type = "not_found_error"


class RequestTooSlow(RequestError):
    status = 408
    code = "request_too_slow"
    type = "timeout_error"


class Conflict(RequestError):
    """The name is taken."""

    status = 409
    code = "conflict"


class PayloadTooLarge(RequestError):
    status = 413
    code = "payload_too_large"


class Overloaded(RequestError):
    """Queue full, memory short, or shutting down."""

    status = 503
    code = "overloaded"
    type = "overloaded_error"


class AgentUnavailable(RequestError):
    """Its files cannot be read now; they stay."""

    status = 503
    code = "agent_unavailable"
    type = "server_error"

    def __init__(self, agent_id: str, reason: str, *, param: str | None = "agent") -> None:
        message = f"agent {agent_id!r} is unavailable: {reason}. Its files stay as they are; see docs/memory.md"
        super().__init__(message, param=param)


class RequestTimedOut(RequestError):
    status = 504
    code = "request_timeout"
    type = "timeout_error"


class ConfigError(AgentCacheError):
    """A setting is invalid."""


class UnsupportedModel(AgentCacheError):
    """The model cannot be served exactly."""


class CacheFolderInUse(AgentCacheError):
    """Another process holds the cache folder."""


class StoreError(AgentCacheError):
    """A file could not be written."""


class DiskBudgetExceeded(StoreError):
    """The write needs `num_bytes` more than the budget allows."""

    def __init__(self, message: str, num_bytes: int = 0) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes


class BlocksLost(StoreError):  # another program removed files from the cache folder
    pass


class FileUnavailable(StoreError):  # a cache file cannot be read now, or a newer release wrote it; it stays
    pass


class BlockRejected(AgentCacheError):  # a cache file failed verification
    pass


class BlockMissing(AgentCacheError):
    pass


class OutOfBlocks(AgentCacheError):  # the RAM budget has no free block
    pass


class OutOfMemory(OutOfBlocks):  # the budget has room, but the machine has no memory
    pass


class RequestCancelled(AgentCacheError):
    pass


class EngineStopped(AgentCacheError):
    pass


class RankLost(EngineStopped):  # another rank has exited or timed out
    pass


class InternalError(AgentCacheError):  # unforeseen failure; the log has details
    pass


class BrokenInvariant(AgentCacheError):  # a bug in agentcache
    pass
