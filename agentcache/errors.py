"""Errors that agentcache raises on purpose.

AgentCacheError
├── RequestError
│   ├── InvalidRequest
│   ├── ContextLengthExceeded    prompt longer than the model's context
│   ├── UnsupportedAdapter       the adapter needs an unsupported feature
│   │   └── UnreadableAdapter    no readable adapter at its path
│   ├── UnsupportedPolicy        model or adapter cannot share its cache in that way
│   ├── Unauthorized
│   ├── NotFound
│   ├── Conflict
│   ├── RequestTooSlow           the request did not arrive in time
│   ├── PayloadTooLarge
│   ├── Overloaded               queue full, memory short, or shutting down
│   ├── AgentUnavailable         files of the agent cannot be read now; they stay
│   └── RequestTimedOut
├── ConfigError
├── UnsupportedModel
├── CacheFolderInUse
├── StoreError
│   ├── DiskBudgetExceeded
│   ├── BlocksLost               another program removed files from the cache folder
│   └── FileUnavailable          a cache file cannot be read now, or a newer release wrote it; it stays
├── BlockRejected                a cache file failed verification
├── BlockMissing                 a cache file does not exist
├── OutOfBlocks                  the RAM budget has no free block
│   └── OutOfMemory              the budget has room, but the machine has no memory
├── RequestCancelled
├── EngineStopped                the engine thread has ended
│   └── RankLost                 another rank has exited or timed out
├── InternalError                unexpected failure of a library or component; details in the log
└── BrokenInvariant              a bug in agentcache
"""

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
    code = "context_length_exceeded"


class UnsupportedAdapter(RequestError):
    code = "adapter_unsupported"


class UnreadableAdapter(UnsupportedAdapter):
    pass


class UnsupportedPolicy(RequestError):
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
    status = 503
    code = "overloaded"
    type = "overloaded_error"


class AgentUnavailable(RequestError):
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


class BlocksLost(StoreError):
    pass


class FileUnavailable(StoreError):
    pass


class BlockRejected(AgentCacheError):
    pass


class BlockMissing(AgentCacheError):
    pass


class OutOfBlocks(AgentCacheError):
    pass


class OutOfMemory(OutOfBlocks):
    pass


class RequestCancelled(AgentCacheError):
    pass


class EngineStopped(AgentCacheError):
    pass


class RankLost(EngineStopped):
    pass


class InternalError(AgentCacheError):
    pass


class BrokenInvariant(AgentCacheError):
    pass
