"""The cache: who owns which page, sharing and eviction, slots, commits."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kdtree_engine.cache import (
    CacheLayout,
    PageAllocator,
    allocate_pool,
    commit_paths,
    pages_for,
    path_places,
)

PAGE = 64


def text(seed: int, pages: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(pages * PAGE)]


def chains(allocator: PageAllocator, tokens: list[int]) -> list[bytes]:
    found: list[bytes] = []
    allocator.extend(found, tokens, len(tokens) // PAGE)
    return found


def fill(allocator: PageAllocator, tokens: list[int]) -> list[int]:
    """Take pages for a text and make them findable."""
    pages = allocator.allocate(len(tokens) // PAGE)
    for page, chain in zip(pages, chains(allocator, tokens), strict=True):
        allocator.publish(page, chain)
    return pages


def test_a_known_prefix_is_shared_and_counted() -> None:
    allocator, tokens = PageAllocator(8), text(1, 3)
    own = fill(allocator, tokens)
    assert allocator.share_prefix(tokens + [7] * 80, most=9) == own
    assert allocator.share_prefix(tokens, most=2) == own[:2]  # no more than asked for
    assert allocator.share_prefix(tokens[: 2 * PAGE + 63], most=9) == own[:2]  # full pages only
    allocator.check_integrity([own, own, own[:2], own[:2]])
    for pages in (own, own, own[:2], own[:2]):
        allocator.release(pages)
    allocator.check_integrity([])
    assert allocator.available == 8


def test_a_page_belongs_to_its_whole_prefix() -> None:
    """Equal tokens after another beginning are another page: their latents differ."""
    allocator, first, second = PageAllocator(8), text(1, 2), text(2, 1)
    pages = fill(allocator, first)
    assert allocator.share_prefix(second + first[PAGE:], most=9) == []
    assert allocator.share_prefix(first[PAGE:], most=9) == []
    changed = [*first[:-1], first[-1] + 1]
    assert allocator.share_prefix(changed, most=9) == pages[:1]


def test_a_page_used_again_is_evicted_last() -> None:
    allocator = PageAllocator(3)
    texts = [text(seed, 1) for seed in range(3)]
    pages = [fill(allocator, one) for one in texts]
    for one in pages:
        allocator.release(one)
    allocator.release(allocator.share_prefix(texts[0], most=1))
    assert [allocator.allocate(1) for _ in range(3)] == [pages[1], pages[2], pages[0]]
    assert [allocator.share_prefix(one, most=1) for one in texts] == [[], [], []]


def test_free_pages_are_taken_before_known_ones() -> None:
    allocator, tokens = PageAllocator(3), text(1, 1)
    allocator.release(fill(allocator, tokens))
    taken = allocator.allocate(2)
    assert allocator.share_prefix(tokens, most=1) != []
    assert len(set(taken)) == 2


def test_eviction_order_is_release_order() -> None:
    allocator = PageAllocator(3)
    texts = [text(seed, 1) for seed in range(3)]
    pages = [fill(allocator, one) for one in texts]
    for index in (1, 2, 0):
        allocator.release(pages[index])
    assert [allocator.allocate(1) for _ in range(3)] == [pages[1], pages[2], pages[0]]


def test_the_first_page_of_a_chain_stays() -> None:
    """Two requests that computed the same page at once: one is findable, none is lost."""
    allocator, tokens = PageAllocator(4), text(1, 1)
    one, other = fill(allocator, tokens), fill(allocator, tokens)
    assert allocator.share_prefix(tokens, most=1) == one
    allocator.check_integrity([one, one, other])
    allocator.release(one + one + other)
    allocator.check_integrity([])
    assert allocator.available == 4


def test_keys_differ_between_allocators() -> None:
    """Nobody outside can compute a chain, so nobody can craft a collision."""
    assert chains(PageAllocator(1), [1] * PAGE) != chains(PageAllocator(1), [1] * PAGE)


def test_misuse_is_an_assertion() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(2)
    with pytest.raises(AssertionError, match="beyond the available"):
        allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="more often than taken"):
        allocator.release(pages[:1])
    with pytest.raises(AssertionError):
        allocator.publish(pages[0], b"chain")


@pytest.mark.parametrize("fault", ["leak", "double free", "still findable", "wrong count"])
def test_check_integrity_can_fail(fault: str) -> None:
    allocator = PageAllocator(4)
    pages = fill(allocator, text(1, 2))
    owners = [pages]
    allocator.check_integrity(owners)
    if fault == "leak":
        del allocator._users[pages[0]]
        owners = [pages[1:]]
    elif fault == "double free":
        allocator._free.append(allocator._free[0])
    elif fault == "still findable":
        allocator._users.clear()
        allocator._free += pages
        owners = []
    else:
        owners = [pages, pages]
    with pytest.raises(AssertionError):
        allocator.check_integrity(owners)


class Allocation(RuleBasedStateMachine):
    """Random requests over few texts, against a plain model of who uses what."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(7)
        self.owners: list[list[int]] = []

    @precondition(lambda self: len(self.owners) < 6)
    @rule(seed=st.integers(0, 2), length=st.integers(1, 4), published=st.integers(0, 4))
    def admit(self, seed: int, length: int, published: int) -> None:
        tokens = text(seed, length)
        shared = self.allocator.share_prefix(tokens, length)
        missing = length - len(shared)
        if missing > self.allocator.available:
            self.allocator.release(shared)
            return
        pages = shared + self.allocator.allocate(missing)
        assert len(set(pages)) == length, "a page twice in one request"
        used = {page for owner in self.owners for page in owner}
        assert not used & set(pages[len(shared) :]), "a page in use was given away"
        for page, chain in list(zip(pages, chains(self.allocator, tokens), strict=True))[
            :published
        ]:
            self.allocator.publish(page, chain)
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(index=st.integers(0, 5))
    def leave(self, index: int) -> None:
        self.allocator.release(self.owners.pop(index % len(self.owners)))

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.allocator.check_integrity(self.owners)
        used = Counter(page for owner in self.owners for page in owner)
        assert self.allocator.available == 7 - len(used)


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ------------------------------------------------------------------- slots, pool and commits


def test_layout_gives_each_page_one_use() -> None:
    layout = CacheLayout(pages=5, requests=3)
    ranges = [range(5 * PAGE)]
    ranges += [
        range(layout.scratch_slot(place), layout.scratch_slot(place) + PAGE) for place in range(3)
    ]
    ranges += [range(slot, slot + PAGE) for slot in (layout.null_slot, layout.spill_slot)]
    assert sorted(slot for one in ranges for slot in one) == list(range(layout.total_pages * PAGE))
    for place in (-1, 3):
        with pytest.raises(AssertionError):
            layout.scratch_slot(place)


def test_path_places_follow_the_request_s_pages() -> None:
    """Entries behind a path stand at its first position, in the spill page."""
    layout = CacheLayout(pages=10, requests=1)
    pages = torch.tensor([[9, 2], [4, 5], [7, 1]], dtype=torch.int32)
    contexts = torch.tensor([62, 64, 127], dtype=torch.int32)
    positions, slots = path_places(layout, 4, torch.tensor([4, 0, 1]), contexts, pages)
    assert positions.tolist() == [[62, 63, 64, 65], [64] * 4, [127] * 4]
    spill = layout.spill_slot
    assert slots.tolist() == [
        [9 * PAGE + 62, 9 * PAGE + 63, 2 * PAGE, 2 * PAGE + 1],
        [spill] * 4,
        [1 * PAGE + 63, spill, spill, spill],
    ]
    assert [pages_for(tokens) for tokens in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]


def test_commit_moves_a_path_over_a_page_border() -> None:
    """Rows of scratch go to the request's next places, in every layer; the rest stays, but for the
    spill page.
    """
    layout = CacheLayout(pages=4, requests=2)
    pool = allocate_pool(layout, 3, 6, torch.float32, torch.device("cpu"))
    assert len(pool.latents) == 3 and pool.draft == ()
    for layer, latents in enumerate(pool.latents):
        slots = torch.arange(layout.total_pages * PAGE).float() + 10_000 * layer
        latents.copy_(slots.view(-1, PAGE, 1).expand(-1, -1, 6))
    before = [latents.clone() for latents in pool.latents]
    scratch = torch.tensor([layout.scratch_slot(0), layout.scratch_slot(1)])
    rows = scratch[:, None] + torch.arange(6)
    indices = torch.tensor([[0, 1, -1, -1], [0, 2, 5, -1]])
    contexts = torch.tensor([10, 62], dtype=torch.int32)
    pages = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    for lengths in (torch.tensor([0, 3]), torch.tensor([0, 0])):
        commit_paths(pool, rows, indices, lengths, contexts, pages)
    source = [int(scratch[1]) + row for row in (0, 2, 5)]
    destination = [3 * PAGE + 62, 3 * PAGE + 63, 0]
    kept = torch.ones(layout.total_pages * PAGE, dtype=torch.bool)
    kept[layout.spill_slot : layout.spill_slot + PAGE] = False
    for old, new in zip(before, pool.latents, strict=True):
        want = old.flatten(0, 1).clone()
        want[destination] = old.flatten(0, 1)[source]
        assert torch.equal(new.flatten(0, 1)[kept], want[kept])


def test_pool_of_a_drafter_shares_the_page_numbers() -> None:
    layout = CacheLayout(pages=4, requests=2)
    pool = allocate_pool(layout, 1, 6, torch.bfloat16, torch.device("cpu"), 2, (3, 5))
    assert [tuple(layer.shape) for layer in pool.draft] == [(8, PAGE, 2, 3, 5)] * 2
    assert pool.draft[0].dtype == torch.bfloat16


def test_of_a_chain_the_end_is_forgotten_first() -> None:
    """Its beginning is what makes the rest findable."""
    allocator, tokens = PageAllocator(4), text(1, 3)
    pages = fill(allocator, tokens)
    allocator.release(pages)
    allocator.allocate(2)  # the free page, and one that was known
    assert allocator.share_prefix(tokens, most=3) == pages[:2]


@pytest.mark.parametrize("broken", ["nothing", "allocate", "release", "publish", "forget"])
def test_reclaimed_after_an_interrupt(broken: str) -> None:
    """Whatever was half done, all pages are there, and those that are known are found."""
    allocator, tokens = PageAllocator(5), text(1, 2)
    pages = fill(allocator, tokens)
    if broken == "allocate":
        allocator._free.pop()
    elif broken == "release":
        del allocator._users[pages[0]]
    elif broken == "publish":
        del allocator._chain_of[pages[1]]
    elif broken == "forget":
        allocator.release(pages)
        del allocator._idle[pages[1]]
        allocator._chain_of.pop(pages[1])
    allocator.reclaim()
    allocator.check_integrity()
    assert allocator.available == 5
    assert allocator.share_prefix(tokens, most=2) == pages
