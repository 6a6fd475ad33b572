"""Lessons: training sequences with what the target thought of them, computed once and kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.errors import OptionError
from kdtree_engine.log import progress
from kdtree_engine.training.data import Ids
from kdtree_engine.training.teacher import Teacher

HELD_SHARE, HELD_MOST = 20, 64  # one sequence in so many is held out, and at most so many


@dataclass(frozen=True, eq=False)
class Lesson:
    """B sequences: tokens [B, S] int64, taps [B, S, n * H], hidden [B, S, H].

    hidden is the target's last layer, before its final norm.
    """

    tokens: Tensor
    taps: Tensor
    hidden: Tensor


class Lessons:
    """Random batches of sequences, the target run once over each.

    The tokens are cut into rows of the teacher's length and shuffled. As many rows as `capacity`
    bytes hold are taught at a time; when there are more, the next ones take their places after
    every `repeats` passes. Held-out rows are for measuring only.
    """

    def __init__(
        self, tokens: Ids, teacher: Teacher, capacity: int, seed: int, repeats: int = 8
    ) -> None:
        length, self.batch, self.teacher = teacher.length, teacher.batch, teacher
        count = len(tokens) // length
        held = min(count // HELD_SHARE, HELD_MOST)
        if held < 1:
            raise OptionError(
                f"the training data has {len(tokens)} tokens; sequences of {length} need at least "
                f"{HELD_SHARE * length}"
            )
        self._random = torch.Generator().manual_seed(seed)
        rows = torch.from_numpy(tokens[: count * length]).view(count, length)
        rows = rows[torch.randperm(count, generator=self._random)]
        self._held, self._rows = rows[:held], rows[held:]
        size = max(self.batch, capacity // teacher.bytes_per_sequence)
        self._pool_size = min(size, len(self._rows))
        self._steps = repeats * max(1, self._pool_size // self.batch)
        self._first = self._step = 0
        self._pool: Lesson | None = None

    def fill(self) -> Lesson:
        """Run the target over the next rows, as many as fit."""
        places = torch.arange(self._first, self._first + self._pool_size) % len(self._rows)
        self._pool = None  # give its memory back before the next one is made
        self._pool = self._teach(self._rows[places])
        self._first, self._step = int(places[-1]) + 1, 0
        return self._pool

    def next(self) -> Lesson:
        """The next batch."""
        used_up = self._step >= self._steps and self._pool_size < len(self._rows)
        pool = self.fill() if self._pool is None or used_up else self._pool
        self._step += 1
        chosen = torch.randint(self._pool_size, (self.batch,), generator=self._random)
        chosen = chosen.to(pool.tokens.device)
        return Lesson(pool.tokens[chosen], pool.taps[chosen], pool.hidden[chosen])

    def held(self) -> Iterator[Lesson]:
        """The held-out sequences, in batches; the last batch repeats some to be full."""
        for first in range(0, len(self._held), self.batch):
            places = torch.arange(first, first + self.batch) % len(self._held)
            yield self._teach(self._held[places], shown=False)

    def _teach(self, rows: Tensor, shown: bool = True) -> Lesson:
        parts = []
        with progress("running the target", len(rows), shown=shown) as meter:
            for first in range(0, len(rows), self.batch):
                part = rows[first : first + self.batch]
                missing = self.batch - len(part)
                full = torch.cat((part, part[:1].expand(missing, -1))) if missing else part
                lesson = self.teacher.run(full.to(self.teacher.target.device, torch.int64))
                parts.append(tuple(x[: len(part)] for x in lesson))
                meter.advance(len(part))
        return Lesson(*(torch.cat(column) for column in zip(*parts, strict=True)))
