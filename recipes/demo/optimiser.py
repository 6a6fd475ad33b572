"""Muon for the matrices, AdamW for the rest.

Muon orthogonalises each momentum matrix; in a run of minutes it needs markedly fewer tokens than
AdamW alone. Matrices of one shape are stacked and treated together, since this model has hundreds
of small ones and separate launches would cost more than the arithmetic.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration on a stack [n, rows, columns] with rows <= columns."""
    a, b, c = COEFFICIENTS
    x = matrices.to(torch.bfloat16)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


class Muon:
    """Momentum, orthogonalised; the update's root mean square is 0.2 of the learning rate."""

    def __init__(
        self, parameters: list[nn.Parameter], decay: float, momentum: float = 0.95
    ) -> None:
        self.decay = decay
        self.momentum = momentum
        self.groups: dict[tuple[int, int], list[tuple[nn.Parameter, int]]] = defaultdict(list)
        for parameter in parameters:
            halves = 2 if parameter.ndim == 3 and parameter.shape[1] < parameter.shape[2] else 1
            rows, columns = parameter.shape[-2] // halves, parameter.shape[-1]
            self.groups[min(rows, columns), max(rows, columns)].append((parameter, rows))
        self.buffers: dict[tuple[int, int], torch.Tensor] = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update of every matrix."""
        for shape, members in self.groups.items():
            pieces = [(p.grad, rows) for p, rows in members]
            grads = torch.cat([self._view(g, rows) for g, rows in pieces if g is not None])
            buffer = self.buffers.setdefault(shape, torch.zeros_like(grads))
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalise(grads.lerp(buffer, self.momentum)) * (0.2 * shape[1] ** 0.5)
            start = 0
            for parameter, rows in members:
                view = self._view(parameter.data, rows)
                piece = update[start : start + len(view)]
                start += len(view)
                view.mul_(1 - rate * self.decay).sub_(piece, alpha=rate)

    @staticmethod
    def _view(tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """A stack of matrices with rows <= columns, sharing the tensor's memory.

        A fused gate and up projection is two matrices: they are trained as such.
        """
        stack = tensor.reshape(-1, rows, tensor.shape[-1])
        return stack if stack.shape[1] <= stack.shape[2] else stack.mT


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters for Muon (hidden matrices) and for AdamW (embedding, head, norms, routers)."""
    hidden, rest = [], []
    for name, parameter in model.named_parameters():
        plain = "embed" in name or "lm_head" in name or "gate.weight" in name
        (rest if plain or parameter.ndim < 2 else hidden).append(parameter)
    return hidden, rest
