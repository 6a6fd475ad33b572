"""What Triton 3.6's interpreter lacks beside NumPy 2.4: loops whose bounds a kernel loaded."""

from __future__ import annotations

from typing import Any


def allow_device_loops() -> None:
    """Let `tl.range(start, stop)` take loaded bounds; twice does no harm.

    The interpreter turns a scalar, an array of one element, into an int by `int(array)`, which
    NumPy refuses from 2.4 on. It sets that conversion anew for every launch; this adds a later one.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "allows_device_loops", False):
        return

    def wrapped(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    wrapped.allows_device_loops = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = wrapped
