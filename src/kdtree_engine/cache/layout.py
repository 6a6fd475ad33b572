"""Where things lie in the paged cache: pages of requests, then scratch, null and spill pages."""

from __future__ import annotations

from dataclasses import dataclass

from kdtree_engine.config import PAGE_SIZE


@dataclass(frozen=True)
class CacheLayout:
    """Page numbers of one cache. A slot is page * 64 + offset.

    Pages 0..pages-1 belong to requests. Each of `requests` request places has one scratch page,
    which holds the rows of its draft tree (at most 64) until the walk. The null page holds zeros
    and stands in for keys that are not there; the spill page takes the writes of padding rows.
    """

    pages: int
    requests: int

    @property
    def total_pages(self) -> int:
        """All pages of a cache tensor."""
        return self.pages + self.requests + 2

    def scratch_slot(self, place: int) -> int:
        """First slot of a request place's scratch page."""
        assert 0 <= place < self.requests
        return (self.pages + place) * PAGE_SIZE

    @property
    def null_slot(self) -> int:
        """First slot of the page of zeros."""
        return (self.pages + self.requests) * PAGE_SIZE

    @property
    def spill_slot(self) -> int:
        """First slot of the page that padding rows write to."""
        return (self.pages + self.requests + 1) * PAGE_SIZE


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_SIZE)
