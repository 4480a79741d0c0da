"""What can go wrong, by name. Every message says which request or option, its value, and the limit."""


class CBatchError(Exception):
    """Base of every error that cbatch raises on purpose."""


class ConfigError(CBatchError, ValueError):
    """An option of the engine is out of range or contradicts another one."""


class InvalidRequestError(CBatchError, ValueError):
    """A request that cannot be served as it is. It was refused alone, at submission."""


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for one generated token, or can never fit into the KV cache."""


class DuplicateRequestError(InvalidRequestError):
    """A request with this id is still running."""


class EngineOverloadedError(CBatchError):
    """As many requests wait as ``max_queue_size`` allows. This one was refused at once; it may come again later."""


class UnsupportedModelError(CBatchError):
    """The model cannot run here with the guarantee of right tokens, so it is refused at load."""


class ModelNotFoundError(CBatchError):
    """No model folder, alias or hub repository answers to this name."""


class EngineClosedError(CBatchError):
    """The engine was closed, so it takes no more requests and ended those that were running."""


class EngineDeadError(CBatchError):
    """The engine's loop failed. ``__cause__`` holds the error; every waiting request hears of it."""


def named(request_id: object) -> str:
    """How a message calls a request, which may have no id yet."""
    return "request" if request_id is None else f"request {request_id}"


def short(value: object) -> str:
    """A value as a message shows it, in 80 characters at the most."""
    try:
        if isinstance(value, (str, bytes, list, tuple)):
            value = value[:80]  # to write out 10 million numbers would hold the GIL for 0.5 s
        text = repr(value)
    except Exception:  # an int of too many digits, or an object that fails to describe itself
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def described(error: BaseException) -> str:
    """Its type and message. Of an error of the user's, whose own code may make the message and fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
