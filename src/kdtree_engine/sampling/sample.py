"""One token per row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.kernels.gumbel import NoiseBounds
from kdtree_engine.kernels.sample import Sampled
from kdtree_engine.kernels.sample import sample as _sample
from kdtree_engine.sampling.noise import seed_word


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """The settings of R rows, each [R] on the logits' device.

    temperature float32 (0 = greedy), top_k int64 (0 = off), top_p float32 (1 = off), min_p float32
    (0 = off), seed int64 (see noise.seed_word), position int64: that of the token being chosen,
    one more than the row's own.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor

    @classmethod
    def from_lists(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        seed: Sequence[int],
        position: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """Rows from Python numbers; seeds may be any integers."""
        return cls(
            torch.tensor(temperature, dtype=torch.float32, device=device),
            torch.tensor(top_k, dtype=torch.int64, device=device),
            torch.tensor(top_p, dtype=torch.float32, device=device),
            torch.tensor(min_p, dtype=torch.float32, device=device),
            torch.tensor([seed_word(one) for one in seed], dtype=torch.int64, device=device),
            torch.tensor(position, dtype=torch.int64, device=device),
        )


def sample(logits: Tensor, rows: SamplingRows, noise: NoiseBounds | None = None) -> Sampled:
    """Tokens [R] int64 and a flag per row from logits [R, V] float32.

    A row's token depends on that row and its settings alone, to the bit. `finite` is False for a
    row with a NaN, with +inf, or with every token forbidden (-inf); its token means nothing.
    noise: as in kernels/sample; it saves time and changes nothing.
    """
    return _sample(
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.position,
        noise,
    )


__all__ = ["Sampled", "SamplingRows", "sample"]
