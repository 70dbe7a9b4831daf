"""Users' functions that a backward pass calls with a tensor's cotangent."""

from collections.abc import Callable
from typing import Any

from sweepgrad.graph.process import registry


class HookHandle:
    """What `register_hook` returns; `remove()` takes the hook away, and so does leaving a `with` block."""

    def __init__(self, hooks: dict[int, Callable[[Any], Any]], hook: "_Hook") -> None:
        self._hooks = hooks
        self._hook = hook  # its id is the key, and no other hook's as long as either the handle or the entry lives

    def remove(self) -> None:
        """Take the hook away; a second call does nothing."""
        with registry.lock:
            self._hooks.pop(id(self._hook), None)

    def __enter__(self) -> "HookHandle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class _Hook:
    """A user's hook, with a check of what it returns."""

    __slots__ = ("check", "function")

    def __init__(self, function: Callable[[Any], Any], check: Callable[[str, Any], None]) -> None:
        self.function = function
        self.check = check

    def __call__(self, ct: Any) -> Any:
        changed = self.function(ct)
        if changed is not None:
            name = getattr(self.function, "__qualname__", type(self.function).__name__)
            self.check(f"the result of the hook `{name}`", changed)
        return changed


def add(
    hooks: dict[int, Callable[[Any], Any]], function: Callable[[Any], Any], check: Callable[[str, Any], None]
) -> HookHandle:
    """Put `function` into a node's `hooks`; `check(subject, value)` raises if it returns what it may not."""
    handle = HookHandle(hooks, _Hook(function, check))
    with registry.lock:
        hooks[id(handle._hook)] = handle._hook
    return handle
