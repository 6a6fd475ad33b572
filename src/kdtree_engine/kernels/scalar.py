"""Numbers as 0-dimensional tensors.

torch turns a Python number into a tensor of the right dtype at every call, which costs more than
the operation itself on small tensors (2.7 us against 1.2; docs/log.md).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def scalar(value: float) -> Tensor:
    """`value` in float32; combines with tensors on any device and keeps their dtype."""
    with torch.inference_mode(False):  # else training could not use it
        return torch.tensor(value, dtype=torch.float32)
