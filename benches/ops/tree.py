"""What a draft-tree step does besides the network: 63 nodes, horizon 7, vocabulary 163,840.

Each operator alone, CALLS of them in a graph, so that a graph's own launch does not count, and over
different logits, so that they come from memory; and `step`: all of them in the order of a step, one
of them (its launch included) or CALLS in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels import cache_commit, gumbel, top_k, tree_build
from kdtree_engine.kernels import sample as sampling
from kdtree_engine.kernels.cache_commit import reference as commit_reference
from kdtree_engine.kernels.sample import reference as sample_reference
from kdtree_engine.kernels.top_k import reference as top_reference
from kdtree_engine.kernels.tree_accept import AcceptedPaths, tree_accept
from kdtree_engine.kernels.tree_accept import reference as accept_reference
from kdtree_engine.kernels.tree_build import PlannedTrees, TreePlaces
from kdtree_engine.kernels.tree_build import reference as build_reference
from kdtree_engine.kernels.tree_mask import tree_mask
from ops.base import Variant

VOCAB, HORIZON, NODES, LAYERS, DRAFT_LAYERS = 163_840, 7, 63, 61, 5
CONTEXT = 60
SETTINGS = {
    "T=0": (0.0, 0, 1.0, 0.0),
    "T=1": (1.0, 0, 1.0, 0.0),
    "T=1 top-p 0.95": (1.0, 0, 0.95, 0.0),
    "T=1 top-k 40": (1.0, 40, 1.0, 0.0),
    "T=1 top-k 40 top-p 0.95": (1.0, 40, 0.95, 0.0),
}
CALLS = 4


class World(NamedTuple):
    """Inputs of a step of R requests: R (NODES + 1) rows."""

    drafts: list[Tensor]  # [R H, V] logits, for one call each
    logits: list[Tensor]  # [R N, V]
    settings: tuple[Tensor, ...]  # of the rows
    noise: tuple[Tensor, Tensor, Tensor]  # temperatures, seeds and positions of the draft rows
    wanted: gumbel.NoiseWanted  # bounds of the noise that the sampled rows share
    places: TreePlaces
    pages: Tensor
    latents: list[Tensor]
    states: list[Tensor]  # the drafter's keys and values


def world(requests: int, setting: tuple[float, int, float, float]) -> World:
    """Logits like a model's: most tokens near 0, a few far above."""
    random = torch.Generator("cuda").manual_seed(0)

    def logits(rows: int) -> Tensor:
        flat = torch.randn(rows, VOCAB, generator=random, device="cuda") * 2.5
        top = torch.randint(0, VOCAB, (rows, 40), generator=random, device="cuda")
        peak = 18 - torch.arange(40, device="cuda") * 0.25
        return flat.scatter(1, top, peak.expand(rows, 40))

    def column(value: float, dtype: torch.dtype, rows: int) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    rows, total = requests * (NODES + 1), requests * 5 + 1
    heat, k, p, q = setting
    settings = (
        column(heat, torch.float32, rows),
        column(k, torch.int64, rows),
        column(p, torch.float32, rows),
        column(q, torch.float32, rows),
        column(7, torch.int64, rows),
        torch.arange(rows, device="cuda") % (HORIZON + 1) + CONTEXT + 1,
    )
    drafted = requests * HORIZON
    positions = torch.arange(drafted, device="cuda") % HORIZON + CONTEXT + 1
    place = torch.arange(requests, device="cuda")
    contexts = torch.full((requests,), CONTEXT, dtype=torch.int32, device="cuda")
    return World(
        [logits(drafted) for _ in range(CALLS)],
        [logits(rows) for _ in range(CALLS)],
        settings,
        (column(heat, torch.float32, drafted), column(7, torch.int64, drafted), positions),
        gumbel.NoiseWanted(
            column(7, torch.int64, requests),
            column(heat, torch.float32, requests),
            HORIZON + 1,
            VOCAB,
        ),
        TreePlaces(place + 5, contexts, (requests * 4 + place) * 64),
        torch.arange(requests * 4, device="cuda").view(requests, 4).int(),
        [torch.randn(total, 64, 576, device="cuda").bfloat16() for _ in range(LAYERS)],
        [torch.randn(total, 64, 2, 1, 128, device="cuda").bfloat16() for _ in range(DRAFT_LAYERS)],
    )


def candidates(on: World, call: int = 0) -> tuple[Tensor, Tensor]:
    """Candidates [R, H, NODES] of every depth."""
    values, ids = top_k.top_log_probs(on.drafts[call], NODES, *on.noise)
    return values.view(-1, HORIZON, NODES), ids.view(-1, HORIZON, NODES)


def plan(
    on: World, values: Tensor, ids: Tensor, noise: bool = True, helpers: int = tree_build.HELPERS
) -> PlannedTrees:
    """Trees, and with them the bounds of the noise."""
    wanted = on.wanted if noise else None
    made = tree_build._launch_tree(
        values, ids, NODES, None, None, False, on.places, 1 << 18, wanted, helpers
    )
    trees, ancestors, rows, bounds = made
    assert rows is not None
    return PlannedTrees(trees, ancestors, rows, bounds)


def walk(trees: PlannedTrees, picked: sampling.Sampled) -> AcceptedPaths:
    shape = trees.trees.tokens.shape
    return tree_accept(
        trees.trees.tokens,
        trees.trees.parents,
        picked.tokens.view(shape),
        HORIZON + 1,
        picked.finite.view(shape),
    )


def commit(on: World, trees: PlannedTrees, paths: AcceptedPaths, states: bool = False) -> None:
    """The latents' rows. states: the drafter's, too, which in a step it writes itself."""
    for layers in (on.latents, on.states)[: 1 + states]:
        cache_commit.commit_paths_device(
            layers, trees.rows.slots, paths.indices, paths.lengths, on.places.contexts, on.pages,
            (len(on.latents[0]) - 1) * 64,
        )  # fmt: skip


def step(
    on: World, call: int = 0, noise: bool = True, states: bool = False,
    helpers: int = tree_build.HELPERS, merge_warps: int = 8, **tiles: int,
) -> AcceptedPaths:  # fmt: skip
    """Everything in order; the positions of the sampled rows are given, not the trees'.

    noise: its bounds come with the trees, or every row draws its own. tiles: of sampling.
    """
    values, ids = top_k._launch_top(on.drafts[call], NODES, *on.noise, merge_warps=merge_warps)
    shape = (-1, HORIZON, NODES)
    trees = plan(on, values.view(shape), ids.view(shape), noise, helpers)
    picked = sampling._launch_sample(on.logits[call], *on.settings, trees.noise, **tiles)
    paths = walk(trees, picked)
    commit(on, trees, paths, states)
    return paths


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> str | None:
    """What differs, if anything."""
    wrong = [
        field
        for field, (one, other) in enumerate(zip(got, want, strict=True))
        if not torch.equal(one.cpu(), other.cpu())
    ]
    return f"outputs {wrong} differ" if wrong else None


def variants() -> Iterator[Variant]:
    """Every operator for 1 and 8 requests, the sizes of chunks and tiles, and whole steps."""
    for requests in (1, 8):
        on = world(requests, SETTINGS["T=0"])
        yield from _candidates(f"R={requests} T=0", on)
        yield from _trees(requests, "T=0", on)
        yield from _commits(requests, on)
        for name, setting in SETTINGS.items():
            on = world(requests, setting)
            if name == "T=1":
                yield from _candidates(f"R={requests} T=1", on)
                yield from _trees(requests, "T=1", on)
            yield from _samples(f"R={requests} {name}", on)
            yield from _steps(f"R={requests} {name}", on)


STEPS: tuple[dict[str, int], ...] = (
    {},
    {"noise": False},
    {"states": True},
    {"helpers": 1},
    {"helpers": 8},
    {"merge_warps": 16},
    {"chunk": 2048, "warps": 4},
    {"rows_a_tile": 8, "wide": 32},
)


def _steps(name: str, on: World) -> Iterator[Variant]:
    moved = on.drafts[0].nbytes + on.logits[0].nbytes
    bare = name.endswith(("T=0", "T=1"))  # no filters
    ways = [(1, sizes) for sizes in (STEPS if bare else STEPS[:2])]
    for calls, sizes in (*ways, (CALLS, {})):

        def run(call: int, sizes: dict[str, int] = sizes) -> AcceptedPaths:
            return step(on, call, **sizes)  # type: ignore[arg-type]

        shown = "".join(f" {key} {int(value)}" for key, value in sizes.items())
        yield Variant(
            f"step {name} | {calls} in a graph{shown}",
            run,
            lambda run=run: _check_step(on, run(0)),  # type: ignore[misc]
            calls,
            moved,
        )


def _candidates(name: str, on: World) -> Iterator[Variant]:
    want = top_reference.top_log_probs(on.drafts[0], NODES, *on.noise)[1]
    launches = ((1024, 4, 32, 8), (1024, 4, 32, 16), (2048, 8, 32, 8), (1024, 4, 64, 8))
    for chunk, warps, length, merging in launches:

        def run(
            call: int, chunk: int = chunk, warps: int = warps, length: int = length,
            merging: int = merging,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            return top_k._launch_top(
                on.drafts[call], NODES, *on.noise,
                chunk=chunk, warps=warps, run=length, merge_warps=merging,
            )  # fmt: skip

        yield Variant(
            f"top_k {name} | chunk {chunk} warps {warps} run {length} merge warps {merging}",
            run,
            lambda run=run: _check_candidates(run(0)[1], want, on),  # type: ignore[misc]
            CALLS,
            on.drafts[0].nbytes,
        )


def _check_candidates(ids: Tensor, want: Tensor, on: World) -> str | None:
    """With noise, values within 2^-15 of one another may change places."""
    if float(on.noise[0][0]) == 0:
        return same((ids,), (want,))
    moved = float((ids != want).float().mean())
    return f"{moved:.1%} of the candidates differ" if moved > 0.02 else None


SAMPLES: tuple[tuple[bool, dict[str, int]], ...] = (
    (True, {}),
    (False, {}),
    (True, {"chunk": 2048, "warps": 4}),
    (True, {"rows_a_tile": 8, "wide": 32}),
    (True, {"rows_a_tile": 8}),
)


def _samples(name: str, on: World) -> Iterator[Variant]:
    """Sampling with the bounds given, and its two kernels alone."""
    want = sample_reference.sample(on.logits[0], *on.settings)
    bounds = gumbel._launch_bounds(
        on.wanted.seeds, on.places.contexts, on.wanted.temperature, HORIZON + 1, VOCAB
    )
    moved = on.logits[0].nbytes
    for noise, sizes in SAMPLES if name.endswith("T=1") else SAMPLES[:2]:
        read = bounds if noise else None

        def run(
            call: int, read: gumbel.NoiseBounds | None = read, sizes: dict[str, int] = sizes
        ) -> sampling.Sampled:
            return sampling._launch_sample(on.logits[call], *on.settings, read, **sizes)

        shown = "".join(f" {key} {value}" for key, value in sizes.items())
        yield Variant(
            f"sample {name} | noise {'read' if noise else 'by row'}{shown}",
            run,
            lambda run=run: same(run(0), want),  # type: ignore[misc]
            CALLS,
            moved,
        )
    heat, _, top_p, _, seeds, positions = on.settings

    def find(call: int) -> sampling.Runs:
        return sampling._find_runs(on.logits[call], heat, top_p, seeds, positions, bounds)

    found = [find(call) for call in range(CALLS)]

    def choose(call: int) -> sampling.Sampled:
        return sampling._choose(on.logits[call], on.settings, found[call])

    yield Variant(f"runs {name} | noise read", find, lambda: None, CALLS, moved)
    yield Variant(f"choose {name}", choose, lambda: same(choose(0), want), CALLS, 0)


def _trees(requests: int, name: str, on: World) -> Iterator[Variant]:
    values, ids = candidates(on)
    trees = plan(on, values, ids)
    picked = sampling.sample(on.logits[0], *on.settings)
    picks = picked.tokens.view(trees.trees.tokens.shape).clone()
    for row in range(NODES, 0, -1):  # a row picks its first child
        above = trees.trees.parents[:, row]
        here = torch.arange(requests, device="cuda")
        picks[here, above] = trees.trees.tokens[:, row]
    taken = sampling.Sampled(picks.flatten(), picked.finite)

    def check_plan(made: PlannedTrees) -> str | None:
        want = build_reference.tree_build(values.cpu(), ids.cpu(), NODES)
        wrong = same(made.trees, want)
        if made.noise is None or name == "T=0" or wrong:
            return wrong
        seeds, heat, depths, vocab = on.wanted
        bounds = gumbel._launch_bounds(seeds, on.places.contexts, heat, depths, vocab)
        return same((made.noise.values,), (bounds.values,))

    def check_walk() -> str | None:
        given = (trees.trees.tokens, trees.trees.parents, picks, HORIZON + 1)
        return same(walk(trees, taken), accept_reference.tree_accept(*given))

    def check_mask() -> str | None:
        return same((tree_mask(trees.trees.parents),), (trees.ancestors,))

    for noise, helpers in ((False, 0), (True, 1), (True, 3), (True, 8)):

        def build(_: int, noise: bool = noise, helpers: int = helpers) -> PlannedTrees:
            return plan(on, values, ids, noise, helpers)

        shown = f"noise by {helpers} a multiprocessor" if noise else "no noise"
        yield Variant(
            f"tree_build R={requests} {name} | {shown}",
            build,
            lambda build=build: check_plan(build(0)),  # type: ignore[misc]
            CALLS,
            0,
        )
    if name != "T=0":
        return
    yield Variant(f"tree_accept R={requests}", lambda _: walk(trees, taken), check_walk, CALLS, 0)
    yield Variant(
        f"tree_mask R={requests}", lambda _: tree_mask(trees.trees.parents), check_mask, CALLS, 0
    )


def _commits(requests: int, on: World) -> Iterator[Variant]:
    length = HORIZON + 1
    slots = on.places.scratch[:, None] + torch.arange(NODES + 1, device="cuda")
    indices = torch.arange(length, device="cuda").mul(7).expand(requests, length).contiguous()
    lengths = torch.full((requests,), length, device="cuda")
    move = (slots, indices, lengths, on.places.contexts, on.pages)
    for columns in (128, 256, 512):

        def run(_: int, columns: int = columns) -> None:
            cache_commit._launch_paths(on.latents, *move, columns=columns)

        def check(run: Callable[[int], None] = run) -> str | None:
            want = [layer.clone() for layer in on.latents]
            commit_reference.commit_paths(want, *move, (len(want[0]) - 1) * 64)
            run(0)
            return same(tuple(on.latents), tuple(want))

        moved = 2 * requests * length * LAYERS * 576 * 2
        yield Variant(f"commit R={requests} | columns {columns}", run, check, CALLS, moved)


def _check_step(on: World, got: AcceptedPaths) -> str | None:
    values, ids = candidates(on)
    built = build_reference.tree_build(values.cpu(), ids.cpu(), NODES)
    tokens, finite = sample_reference.sample(on.logits[0], *on.settings)
    shape = built[0].shape
    given = (built[0], built[1], tokens.view(shape).cpu(), HORIZON + 1, finite.view(shape).cpu())
    return same(got, accept_reference.tree_accept(*given))
