"""Copies a module without its weights. Knows modules and parameters; knows nothing of attention or engines."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from cbatch.errors import UnsupportedModelError

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` wrapped, or the module itself."""
    while isinstance(module, OptimizedModule):
        module = module._orig_mod
    return module


def structural_copy(module: nn.Module) -> Any:
    """Copy a module's structure, config and computed buffers, but share its weights, and put the copy in eval mode.

    The copy shares all parameters and persistent buffers (weights too, such as an MoE router's bias), so it sees the
    caller's in-place updates at once and takes no memory for them. Computed buffers (RoPE frequencies, which some
    families rewrite in their forward) are copied. Hooks are shared: to copy a bound method would copy its owner.
    Raises UnsupportedModelError if an attribute of the module cannot be copied.
    """
    module = uncompiled(module)
    shared: dict[int, Any] = {id(p): p for p in module.parameters()}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                shared[id(buffer)] = buffer
        for hooks in _HOOKS:
            shared.update((id(hook), hook) for hook in getattr(part, hooks, {}).values())
    try:
        # Innermost first, to unwrap a compiled part within a compiled part too.
        for part in reversed(list(module.modules())):
            if isinstance(part, OptimizedModule):
                shared[id(part)] = copy.deepcopy(uncompiled(part), shared)
        twin = copy.deepcopy(module, shared)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{type(module).__name__} holds something that cannot be copied, so it would not be left as it was: {error}"
        ) from error
    for part in twin.modules():
        # model.forward = torch.compile(model.forward) is bound to the caller's module.
        if hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable"):
            del part.forward
    return twin.eval()
