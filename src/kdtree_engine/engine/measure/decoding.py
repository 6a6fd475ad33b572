"""The step that is measured: the engine's own, on requests that are as if in the midst of decoding.

Nothing is prefilled: every page holds random latents, and a request is said to stand at any
context. A step moves it on; it is set back outside of what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kdtree_engine.cache import CacheLayout, CachePool, allocate_pool
from kdtree_engine.config import MAX_ROWS_PER_REQUEST, PAGE_SIZE, DrafterConfig, EngineConfig
from kdtree_engine.drafter.base import Drafter, DraftState
from kdtree_engine.drafter.dflash import DFlashDrafter
from kdtree_engine.drafter.dflash_model import DFlashModel
from kdtree_engine.engine.graphs import Landing
from kdtree_engine.engine.loop import Engine
from kdtree_engine.engine.request import Request
from kdtree_engine.engine.sampling_params import SamplingParams
from kdtree_engine.engine.step import StepOutput, Stopwatch, decode_step
from kdtree_engine.model import Kimi, moe
from kdtree_engine.types import DraftBlock, DraftBlocks

HORIZON = 7  # depths of a draft: the published drafter's block of 8, less the root
_ENDLESS = 1 << 30  # tokens that a request may still emit: no tree is cut


class Given:
    """A host drafter that is not asked: its blocks come with the step."""

    name = "given"
    trained = False
    on_device: Literal[False] = False
    horizon = HORIZON
    tap_layers: tuple[int, ...] = ()

    def propose(self, states: Sequence[DraftState], candidates: int) -> list[DraftBlock]:
        """Not called."""
        raise AssertionError("blocks come with the step")

    def reset(self, request: int) -> None:
        """Nothing to forget."""


def brooms(requests: int, rows: int, vocab: int, seed: int = 0) -> tuple[list[int], DraftBlocks]:
    """Roots, and blocks whose trees of `rows` rows are one chain of HORIZON nodes and else siblings
    at depth 1.

    Every row has a token of its own as far as the vocabulary goes, over all requests.
    """
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    width = max(1, min(rows - 1, vocab))
    own = [order[(torch.arange(HORIZON + width) + i * rows) % vocab] for i in range(requests)]
    tokens = torch.stack(own)[:, None, HORIZON:].repeat(1, HORIZON, 1)
    tokens[:, :, 0] = torch.stack(own)[:, 1 : HORIZON + 1]
    log_probs = -5.0 - 0.001 * torch.arange(width, dtype=torch.float32)
    log_probs[0] = -0.1
    blocks = DraftBlocks(tokens, log_probs.expand(requests, HORIZON, width).contiguous())
    return [int(one[0]) for one in own], blocks


def random_pool(
    target: Kimi, layout: CacheLayout, dtype: torch.dtype, drafter: DrafterConfig | None = None
) -> CachePool:
    """Random values in every page but the null page."""
    draft: tuple[int, tuple[int, int]] = (0, (0, 0))
    if drafter is not None:
        draft = drafter.num_layers, (drafter.num_kv_heads, drafter.head_dim)
    config, device = target.config, target.device
    pool = allocate_pool(layout, config.num_layers, config.latent_dim, dtype, device, *draft)
    for layer in (*pool.latents, *pool.draft):
        layer.normal_()
        layer[layout.null_slot // PAGE_SIZE] = 0
    return pool


@dataclass(frozen=True, eq=False)
class Decoding:
    """An engine, its requests, and what drafts: blocks on the host, or, None, the engine's drafter.

    rows: of each request's tree.
    """

    engine: Engine
    requests: tuple[Request, ...]
    rows: int
    blocks: DraftBlocks | None

    def stand(self, context: int) -> None:
        """From now on every request has this many cached tokens."""
        for request in self.requests:
            request.context = context
        self.reset()

    def reset(self) -> None:
        """Set the requests back to where they stand."""
        for request in self.requests:
            self.engine.state.start(request)

    def launch(self) -> Landing:
        """One step from where the requests stand, through the runner."""
        self.reset()
        self.engine.runner.launch(self.requests, self.rows, self.blocks)
        return self.engine.runner.collect()

    def operators(self) -> StepOutput:
        """One step, operator by operator, on these requests."""
        device = self.engine.device
        places = torch.tensor([request.place for request in self.requests], device=device)
        blocks = self.blocks
        if blocks is not None:
            blocks = DraftBlocks(blocks.tokens.to(device), blocks.log_probs.to(device))
        return decode_step(self.engine, places, self.rows, blocks, Stopwatch())

    def captured(self) -> Callable[[], object]:
        """What does the step again, from wherever the requests are: the replay of the very graph
        that the engine replays; the operators where it captures none.
        """
        self.launch()
        runner = self.engine.runner
        if not runner.captures:
            return self.operators
        return runner.graph(len(self.requests), self.rows, self.blocks is not None).replay


def decoding(
    target: Kimi,
    pool: CachePool,
    rows: int,
    roots: list[int],
    blocks: DraftBlocks | None,
    temperature: float = 0.0,
    drafter: DFlashModel | None = None,
    eager: bool = False,
) -> Decoding:
    """A request of `rows` rows for each of `roots`, at context 0; they share the pages of the pool.

    Without a drafter `blocks` are drafted; with one, they must be None.
    """
    assert 1 <= rows <= MAX_ROWS_PER_REQUEST and len(roots) <= pool.layout.requests
    chosen: Drafter = Given()
    if drafter is not None:
        chosen = DFlashDrafter(drafter, target, pool)
    config = EngineConfig(rows - 1, max_requests=pool.layout.requests, eager=eager)
    engine = Engine(target, chosen, pool, config)
    share = pool.layout.pages // len(roots)
    random = torch.Generator().manual_seed(len(roots))
    pages = torch.randperm(pool.layout.pages, generator=random)[: share * len(roots)]
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    requests = []
    for place, (root, own) in enumerate(zip(roots, pages.view(-1, share).tolist(), strict=True)):
        request = Request(place, params, place, [root], 1, _ENDLESS, frozenset())
        request.place, request.pages = place, own[: engine.state.pages(place).shape[0]]
        engine.state.admit(request)
        requests.append(request)
    given = blocks if rows > 1 and drafter is None else None
    found = Decoding(engine, tuple(requests), rows, given)
    found.reset()
    return found


def distinct_experts(step: Decoding) -> list[float]:
    """How many different experts each layer's rows choose in this step."""
    step.reset()
    with _recorded_choices() as chosen:
        step.operators()
    step.reset()
    config = step.engine.target.config
    layers = sum(config.is_moe_layer(layer) for layer in range(config.num_layers))
    assert len(chosen) == layers, f"{len(chosen)} choices of experts seen in {layers} layers"
    return [float(len(set(experts.flatten().tolist()))) for experts in chosen]


@contextmanager
def _recorded_choices() -> Iterator[list[Tensor]]:
    """The experts [R, k] that the routers of one forward choose, layer by layer.

    The model has no business handing them out, so its router is watched from here.
    """
    found: list[Tensor] = []
    names = [name for name in ("route", "route_rows") if hasattr(moe, name)]
    before = {name: getattr(moe, name) for name in names}

    def watched(operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            result = operator(*args, **options)
            found.append(result[0])
            return result

        return call

    try:
        for name, operator in before.items():
            setattr(moe, name, watched(operator))
        yield found
    finally:
        for name, operator in before.items():
            setattr(moe, name, operator)
