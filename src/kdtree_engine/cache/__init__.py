"""The paged cache: layout, tensors, page ownership, commit."""

from __future__ import annotations

from kdtree_engine.cache.commit import commit_paths, path_places
from kdtree_engine.cache.layout import CacheLayout, pages_for
from kdtree_engine.cache.pages import PageAllocator
from kdtree_engine.cache.pool import CachePool, allocate_pool

__all__ = [
    "CacheLayout",
    "CachePool",
    "PageAllocator",
    "allocate_pool",
    "commit_paths",
    "pages_for",
    "path_places",
]
