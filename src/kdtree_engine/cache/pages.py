"""Which pages are whose: allocation, sharing of equal prefixes, eviction, integrity check."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from kdtree_engine.config import PAGE_SIZE


class PageAllocator:
    """Pages 0..count-1, counted by how many requests use each.

    A full page is known by the keyed hash of its whole token chain and can be shared. A page that
    nobody uses but whose chain is known stays findable until its room is needed, oldest first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._users: Counter[int] = Counter()
        self._page_of: dict[bytes, int] = {}
        self._chain_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, unused, oldest first
        self._key = secrets.token_bytes(32)  # so that nobody can craft a colliding prompt

    @property
    def available(self) -> int:
        """Pages that an allocation could take now."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has checked `available`."""
        assert count <= self.available, "allocation beyond the available pages"
        pages = []
        for _ in range(count):
            if not self._free:
                self._forget(self._idle.popitem(last=False)[0])
            page = self._free.pop()
            self._users[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give back one use of each page, the last first: a chain is found from its beginning, so
        of pages that nobody uses its end is to be forgotten first.
        """
        for page in reversed(pages):
            assert self._users[page] > 0, f"page {page} released more often than taken"
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._chain_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def reclaim(self) -> None:
        """Take all pages from everybody. Those that are known stay findable.

        Right even where another call was interrupted between any two of its lines: a page is in
        `_page_of` from its last token on until it is about to go to somebody else.
        """
        self._users.clear()
        self._chain_of = {page: chain for chain, page in self._page_of.items()}
        known = [page for page in self._idle if page in self._chain_of]
        self._idle = OrderedDict.fromkeys([*known, *self._chain_of])
        self._free = [page for page in range(self.count) if page not in self._chain_of]

    def share_prefix(
        self, tokens: Sequence[int], most: int, chains: list[bytes] | None = None
    ) -> list[int]:
        """Take the known pages that begin `tokens`, at most `most` of them. chains: as in `extend`,
        to be kept by the caller.
        """
        pages: list[int] = []
        chains = [] if chains is None else chains
        for index in range(min(len(tokens) // PAGE_SIZE, most)):
            self.extend(chains, tokens, index + 1)
            page = self._page_of.get(chains[index])
            if page is None:
                break
            self._idle.pop(page, None)
            self._users[page] += 1
            pages.append(page)
        return pages

    def extend(self, chains: list[bytes], tokens: Sequence[int], count: int) -> None:
        """Append the hashes of the token chains that end with the full pages of `tokens`, up to
        `count` of them. A request keeps its list: its tokens only grow, and a long prompt that
        waits is not to be hashed at every step.
        """
        for first in range(len(chains) * PAGE_SIZE, count * PAGE_SIZE, PAGE_SIZE):
            page = tokens[first : first + PAGE_SIZE]
            assert len(page) == PAGE_SIZE
            data = chains[-1] if chains else b""
            data += b"".join(token.to_bytes(4, "little") for token in page)
            chains.append(hashlib.blake2b(data, key=self._key, digest_size=16).digest())

    def publish(self, page: int, chain: bytes) -> None:
        """Make a full page findable. If another page already holds this chain, that one stays."""
        assert self._users[page] > 0
        if chain not in self._page_of and page not in self._chain_of:
            self._page_of[chain] = page
            self._chain_of[page] = chain

    def check_integrity(self, owners: Iterable[Sequence[int]] = ()) -> None:
        """Assert that every page is in exactly one state and that use counts match `owners`."""
        used = Counter(page for pages in owners for page in pages)
        assert used == +self._users, f"use counts {self._users} differ from owners' {used}"
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle and not free & set(used) and not idle & set(used)
        assert len(free) + len(idle) + len(used) == self.count, "a page is lost"
        assert all(page in self._chain_of for page in idle)
        assert {chain: page for page, chain in self._chain_of.items()} == self._page_of
        assert not free & set(self._chain_of), "a free page is still findable"

    def _forget(self, page: int) -> None:
        del self._page_of[self._chain_of.pop(page)]
        self._free.append(page)
