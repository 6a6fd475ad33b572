"""The paged cache: layout, tensors, page ownership, commit."""

from __future__ import annotations

from kdtree_engine.cache.commit import commit_paths, page_slots
from kdtree_engine.cache.layout import CacheLayout, pages_for
from kdtree_engine.cache.pages import PageAllocator
from kdtree_engine.cache.pool import CachePool, allocate_pool

__all__ = [
    "CacheLayout",
    "CachePool",
    "PageAllocator",
    "allocate_pool",
    "commit_paths",
    "page_slots",
    "pages_for",
]
