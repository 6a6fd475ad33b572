"""Where every decoding request stands, in tensors: what a step reads and writes on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.cache import CacheLayout, pages_for
from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.drafter.base import DraftStates
from kdtree_engine.engine.edits import edits_of_place
from kdtree_engine.engine.request import Request
from kdtree_engine.kernels.logit_edits import EditState, empty_edits
from kdtree_engine.sampling import seed_word


@dataclass(frozen=True, eq=False)
class Standing:
    """The state of the B places of a step, gathered.

    root: [B] int64, the last token, not yet in the cache. context: [B] int32, committed tokens.
    remaining: [B] int32, tokens that may still be emitted; 0 or less when a request has ended.
    pages: [B, P] int32. scratch: [B] int64, the first slot for the rows of a tree. seed [B] int64,
    temperature, top_p, min_p [B] float32, top_k [B] int64: as in SamplingRows.
    """

    root: Tensor
    context: Tensor
    remaining: Tensor
    pages: Tensor
    scratch: Tensor
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def for_drafter(self) -> DraftStates:
        """What a device drafter may know."""
        return DraftStates(self.root, self.context, self.pages, self.seed, self.temperature)


class DecodeState:
    """`Standing` of all request places and of one more, the dummy.

    The dummy place has ended before it began: it fills a step up to the size of a graph, its rows
    go to the spill page, and it commits nothing. The host writes a place's table and settings when
    a request is admitted, and where it stands when its prefill is through; from then on every step
    moves it on the device, and the host only adds pages to its table. Shapes never change:
    `positions` bounds the pages of a request.

    edits: tables [places, vocabulary] for options that change logits; made when the first request
    needs them, since they take 8 bytes a token of the vocabulary and place.
    """

    def __init__(
        self, layout: CacheLayout, positions: int, vocab: int, device: torch.device
    ) -> None:
        self.device = device
        self.edits: EditState | None = None
        self._vocab = vocab
        self.dummy = layout.requests
        self._spill_page = layout.spill_slot // PAGE_SIZE
        count = layout.requests + 1

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((count, *shape), value, dtype=dtype, device=device)

        whole, real = torch.int64, torch.float32
        most_pages = max(1, min(layout.pages, pages_for(positions)))
        scratch = [layout.scratch_slot(place) for place in range(layout.requests)]
        self._all = Standing(
            root=full(0, whole),
            context=full(0, torch.int32),
            remaining=full(0, torch.int32),
            pages=full(self._spill_page, torch.int32, most_pages),
            scratch=torch.tensor([*scratch, layout.spill_slot], dtype=whole, device=device),
            seed=full(0, whole),
            temperature=full(0, real),
            top_k=full(0, whole),
            top_p=full(1, real),
            min_p=full(0, real),
        )

    def admit(self, request: Request) -> None:
        """Write a request's table, as far as it has pages, and its settings."""
        state, place = self._all, request.place
        self.extend(request, 0)
        state.pages[place, len(request.pages) :] = self._spill_page
        temperature, top_k, top_p, min_p = request.params.filters
        state.seed[place] = seed_word(request.seed)
        state.temperature[place] = temperature
        state.top_k[place] = top_k
        state.top_p[place] = top_p
        state.min_p[place] = min_p
        if self.edits is None and request.edits is not None:
            self.edits = empty_edits(self.dummy + 1, self._vocab, self.device)
        if self.edits is not None:
            self._write_edits(self.edits, request)

    def _write_edits(self, edits: EditState, request: Request) -> None:
        """Fill the request's place; without options, end what the place's last request left."""
        place = request.place
        one = edits_of_place(request, self._vocab)
        if one is None:
            edits.active[place] = False
            return
        for name, table in vars(edits).items():
            table[place] = upload(getattr(one, name)[0], self.device)

    def extend(self, request: Request, first: int) -> None:
        """Write a request's table from its page number `first` on; it has got more pages."""
        added = torch.tensor(request.pages[first:], dtype=torch.int32)
        self._all.pages[request.place, first : len(request.pages)] = upload(added, self.device)

    def start(self, request: Request) -> None:
        """Write where a request stands whose prefill is through: it decodes from here on."""
        state, place = self._all, request.place
        state.root[place] = request.tokens[-1]
        state.context[place] = request.context
        state.remaining[place] = request.remaining

    def pages(self, place: int) -> Tensor:
        """[P] int32: the pages of one place."""
        return self._all.pages[place]

    def at(self, places: Tensor) -> Standing:
        """The state of places [B] int64."""
        return Standing(*(value.index_select(0, places) for value in vars(self._all).values()))

    def advance(self, places: Tensor, old: Standing, lengths: Tensor, roots: Tensor) -> None:
        """Emit `lengths` [B] int64 tokens at each place; `roots` [B] are the last of them.

        Where nothing is emitted nothing changes, so it does not matter how often the dummy place
        is among them.
        """
        state, moved = self._all, lengths.to(torch.int32)
        state.root.index_copy_(0, places, torch.where(lengths > 0, roots, old.root))
        state.context.index_copy_(0, places, old.context + moved)
        state.remaining.index_copy_(0, places, old.remaining - moved)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Host values on the device, in the stream's order and without waiting for it."""
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)
