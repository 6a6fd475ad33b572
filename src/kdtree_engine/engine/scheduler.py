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
    """First come, first served. A request is admitted when a place and all its pages are free.

    Its pages cover the prompt and everything it may emit, so an admitted request always finishes.
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
        needed = self._pages(request)
        if needed > self.layout.pages:
            raise CapacityError(
                f"the request needs {needed} cache pages of {PAGE_SIZE} tokens for its prompt of "
                f"{request.prompt_tokens} tokens and up to {request.most_tokens} new ones, but the "
                f"cache has {self.layout.pages}; raise cache_pages or lower max_tokens"
            )
        self.waiting.append(request)

    def schedule(self) -> list[Request]:
        """Admit what fits; all running requests."""
        while self.waiting and self._places and self._admit(self.waiting[0]):
            self.waiting.popleft()
        return list(self.running)

    def chunk(self, request: Request) -> int:
        """Prompt tokens that a request computes next."""
        most = self.prefill_chunk
        if request.params.prompt_logprobs is not None:
            most = min(most, SCORED_ROWS)
        return min(most, request.prompt_tokens - request.context)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it stands, and give its pages and its place back.

        A step that is still under way may write to them: the rows of its tree, then what it
        commits, from the device's own count of committed tokens on, which is never below the
        host's. That harms nobody. The next owner's first forward, and the writes that set up its
        place, come later in the same stream. And a page that others may find holds tokens below
        the host's count alone.
        """
        if request in self.running:
            self.running.remove(request)
            self.allocator.release(request.pages)
            request.pages = []
            self._places.append(request.place)
            request.place = -1
        elif request in self.waiting:
            self.waiting.remove(request)

    def publish(self, request: Request) -> None:
        """Make the request's full committed pages findable for others.

        Only once its whole prompt has given finite logits: one broken token in a piece of prompt
        spoils every row of that piece, those before it too.
        """
        if request.is_prefill or request.keep_logits:
            return
        while len(request.chains) < request.context // PAGE_SIZE:
            index = len(request.chains)
            previous = request.chains[-1] if request.chains else b""
            tokens = request.tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            chain = self.allocator.chain(previous, tokens)
            self.allocator.publish(request.pages[index], chain)
            request.chains.append(chain)

    def check_integrity(self) -> None:
        """Assert that pages and places are accounted for."""
        self.allocator.check_integrity([request.pages for request in self.running])
        places = self._places + [request.place for request in self.running]
        assert sorted(places) == list(range(self.layout.requests)), f"places {places}"
        for request in self.running:
            assert len(request.pages) * PAGE_SIZE >= request.context
            if not request.is_prefill:
                assert request.context == len(request.tokens) - 1

    def _pages(self, request: Request) -> int:
        return pages_for(request.prompt_tokens + request.most_tokens)

    def _admit(self, request: Request) -> bool:
        allocator = self.allocator
        shareable = 0 if request.reads_all_rows else (request.prompt_tokens - 1) // PAGE_SIZE
        shared = allocator.share_prefix(request.tokens, shareable)
        missing = self._pages(request) - len(shared)
        if missing > allocator.available:
            allocator.release(shared)
            return False
        request.pages = shared + allocator.allocate(missing)
        request.place = self._places.pop()
        self.state.admit(request)
        request.context = request.stats.cached_tokens = len(shared) * PAGE_SIZE
        self.running.append(request)
        return True
