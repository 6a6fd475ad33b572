"""Which requests a step works on, and whose pages are whose."""

from __future__ import annotations

from collections import deque

from kdtree_engine.cache import CacheLayout, PageAllocator, pages_for
from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.engine.request import Request
from kdtree_engine.engine.state import DecodeState
from kdtree_engine.errors import CapacityError

SCORED_ROWS = 128
"""Prompt rows a step whose logits are all wanted: 84 MB for K2.6; a chunk may be GBs."""


class Scheduler:
    """First come, first served. A request is admitted when a place is free, and pages for what its
    prefill computes and for its first steps. Others are added as it grows.

    Where they run out, the request that was admitted last is **preempted**: it gives everything up
    and waits, before all others, until it is admitted again and computed anew. The one that was
    admitted first is never preempted, and none is refused its pages once it runs alone; so there is
    always one that goes on to its end, and two cannot preempt each other for ever.
    """

    def __init__(self, layout: CacheLayout, prefill_chunk: int, state: DecodeState) -> None:
        self.layout = layout
        self.prefill_chunk = prefill_chunk
        self.state = state
        self.allocator = PageAllocator(layout.pages)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._places = list(range(layout.requests - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request. Raises CapacityError if the whole cache could not hold it."""
        needed = pages_for(request.most_context)
        if needed > self.layout.pages:
            raise CapacityError(
                f"the request needs {needed} cache pages of {PAGE_SIZE} tokens for its prompt of "
                f"{request.prompt_tokens} tokens and up to {request.most_tokens} new ones, but the "
                f"cache has {self.layout.pages}; raise cache_pages or lower max_tokens"
            )
        self.waiting.append(request)

    def schedule(self, steps: int) -> list[Request]:
        """Admit what fits; all running requests, in the order of their admission.

        steps: tokens that the first steps of a request may commit. A request that lets another
        compute their prompt is passed over; one that does not fit holds up all behind it.
        """
        for request in list(self.waiting):
            if self._is_held(request):
                continue
            if not self._places or not self._admit(request, steps):
                break
            self.waiting.remove(request)
        return list(self.running)

    def grow(self, request: Request, tokens: int) -> bool:
        """Give a running request pages for `tokens` tokens, as far as it may ever use them; whether
        there were enough. The device's table follows in the stream's order.
        """
        held = len(request.pages)
        missing = pages_for(min(tokens, request.most_context)) - held
        if missing > self.allocator.available:
            return False
        if missing > 0:
            request.pages += self.allocator.allocate(missing)
            self.state.extend(request, held)
        return True

    def preempt(self) -> None:
        """Let the request that was admitted last wait again. No step under way may have it."""
        assert len(self.running) > 1, "a request that runs alone has all the pages it may need"
        request = self.running[-1]
        self.waiting.appendleft(request)
        self._withdraw(request)
        request.rewind()
        request.stats.preemptions += 1

    def chunk(self, request: Request) -> int:
        """Tokens that a request's prefill computes next."""
        most = min(self.prefill_chunk, SCORED_ROWS) if request.scores_prompt else self.prefill_chunk
        return min(most, request.fill - request.context)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it stands, and give its pages and its place back.

        A step that is still under way may write to them: the rows of its tree, then what it
        commits, from the device's own count of committed tokens on, which is never below the
        host's. That harms nobody. The next owner's first forward, and the writes that set up its
        place, come later in the same stream. And a page that others may find holds tokens below
        the host's count alone.
        """
        if request in self.running:
            self._withdraw(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def abandon(self) -> list[Request]:
        """Take out all running requests, though an interrupt may have come between any two lines of
        this class; returns them. Those that wait keep their turn.
        """
        ended, self.running = self.running, []
        self.waiting = deque(one for one in self.waiting if one not in ended)
        for request in (*ended, *self.waiting):
            request.rewind()
        self.allocator.reclaim()
        self._places = list(range(self.layout.requests - 1, -1, -1))
        return ended

    def publish(self, request: Request) -> None:
        """Make the request's full committed pages findable for others.

        Only once its whole prompt has given finite logits: one broken token in a piece of prompt
        spoils every row of that piece, those before it too.
        """
        if request.is_prefill or request.keep_logits:
            return
        full = request.context // PAGE_SIZE
        self.allocator.extend(request.chains, request.tokens, full)
        for index in range(request.published, full):
            self.allocator.publish(request.pages[index], request.chains[index])
        request.published = full

    def check_integrity(self) -> None:
        """Assert that pages and places are accounted for."""
        self.allocator.check_integrity([request.pages for request in self.running])
        places = self._places + [request.place for request in self.running]
        assert sorted(places) == list(range(self.layout.requests)), f"places {places}"
        for request in self.running:
            assert request.context <= len(request.pages) * PAGE_SIZE
            assert len(request.pages) <= pages_for(request.most_context)
            if request.is_prefill:
                assert request.fill in (len(request.tokens) - 1, len(request.tokens))
                assert request.fill <= len(request.pages) * PAGE_SIZE
            else:
                assert request.context == len(request.tokens) - 1
        for request in self.waiting:
            assert request.is_prefill and request not in self.running
            assert (request.place, request.pages, request.context) == (-1, [], 0)

    def _is_held(self, request: Request) -> bool:
        """Whether the request that it lets go first has still to compute their prompt."""
        first = request.after
        if first is None or not (first.is_prefill and first.is_rootless):
            return False
        return first in self.running or first in self.waiting

    def _admit(self, request: Request, steps: int) -> bool:
        """Whether a request could be given a place and pages.

        A page for each running request that may still want one is left: else the new one could
        have to give everything up at the next step.
        """
        allocator = self.allocator
        shareable = 0 if request.reads_all_rows else (request.fill - 1) // PAGE_SIZE
        shared = allocator.share_prefix(request.tokens, shareable, request.chains)
        missing = pages_for(min(request.fill + steps, request.most_context)) - len(shared)
        growing = sum(len(one.pages) < pages_for(one.most_context) for one in self.running)
        if missing + growing > allocator.available:
            allocator.release(shared)
            return False
        request.pages = shared + allocator.allocate(missing)
        request.place = self._places.pop()
        self.running.append(request)  # whatever fails from here on ends it
        self.state.admit(request)
        request.context = len(shared) * PAGE_SIZE
        if not request.stats.preemptions:
            request.stats.cached_tokens = request.context
        return True

    def _withdraw(self, request: Request) -> None:
        """Take pages and place from a running request."""
        self.running.remove(request)
        self.allocator.release(request.pages)
        request.pages = []
        self._places.append(request.place)
        request.place = -1
