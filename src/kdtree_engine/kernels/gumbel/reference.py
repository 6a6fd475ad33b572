"""Gumbel noise from Philox4x32-10 in torch integer arithmetic, on any device.

A 32-bit word lives in an int64. The product of two words wraps modulo 2^64, which keeps its bits;
the arithmetic shift that fetches the upper half is followed by a mask.
Generator: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

# Elementwise log in torch may take another path for the last few elements of a run. Rows padded to
# whole vectors of every width keep each element on the same path whatever the number of rows.
ROW_UNIT = 64


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Four random words per counter: [..., 4] int64 from words (int64 in 0..2^32-1) of one shape.

    key words broadcast against the counter's. The two halves of a round are the same operations on
    (c0, c1) and (c2, c3), so they are done on a leading axis of 2.
    """
    device = counter[0].device
    tail = (1,) * counter[0].ndim
    multiply = torch.tensor(MULTIPLIERS, device=device).view(2, *tail)
    step = torch.tensor(KEY_STEPS, device=device).view(2, *tail)
    keys = torch.stack(key)
    even = torch.stack((counter[0], counter[2]))
    odd = torch.stack((counter[1], counter[3]))
    for _ in range(ROUNDS):
        # c0' = hi(c2 m1) ^ c1 ^ k0   c1' = lo(c2 m1)
        # c2' = hi(c0 m0) ^ c3 ^ k1   c3' = lo(c0 m0)
        crossed = (even * multiply).flip(0)
        # in place: at these sizes half the time would go to fresh tensors
        even = (crossed >> 32).bitwise_xor_(odd).bitwise_xor_(keys).bitwise_and_(WORD)
        odd = crossed  # its upper half is dropped by the next mask
        keys = (keys + step) & WORD
    odd = odd & WORD
    return torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1)


def words(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """[R, V] int64 random words, V = vocab rounded up to ROW_UNIT; word t belongs to token t."""
    blocks = -(-vocab // ROW_UNIT) * ROW_UNIT // 4
    block = torch.arange(blocks, device=seeds.device).expand(len(seeds), blocks)
    low = (positions & WORD)[:, None].expand_as(block)
    high = ((positions >> 32) & WORD)[:, None].expand_as(block)
    stream = torch.zeros_like(block)
    key = ((seeds & WORD)[:, None], ((seeds >> 32) & WORD)[:, None])
    return philox((low, high, block, stream), key).flatten(1)


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """See the operator. seeds, positions [R] int64."""
    if seeds.device.type != "cpu":
        return _noise(seeds, positions, vocab)
    # Rows of one request at one depth share their noise; on the host a look-up is free.
    where: dict[tuple[int, int], int] = {}
    pairs = list(zip(seeds.tolist(), positions.tolist(), strict=True))
    index = [where.setdefault(pair, len(where)) for pair in pairs]
    if len(where) == len(pairs):
        return _noise(seeds, positions, vocab)
    unique = torch.tensor(list(where), dtype=torch.int64)
    return _noise(unique[:, 0], unique[:, 1], vocab)[torch.tensor(index)]


def _noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    uniform = words(seeds, positions, vocab).double().add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().float()[:, :vocab]
