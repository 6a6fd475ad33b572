"""Operator: penalties, bias, forbidden tokens and phrases, each row of a draft tree with its own
path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import has_kernel, launch_options
from kdtree_engine.kernels.logit_edits import reference
from kdtree_engine.kernels.logit_edits.reference import IN_PROMPT, IS_STOP, MOST_COUNTED
from kdtree_engine.kernels.tree_mask import MAX_ROWS

LENGTH = 16
"""Tokens of a forbidden phrase, at most."""

PHRASES = 64
"""Forbidden phrases of a place, at most."""


@dataclass(frozen=True, eq=False)
class EditState:
    """The settings of P request places and what they need of each text; written in place.

    words: [P, V] int32. Bits 0..27: how often the token was emitted; IN_PROMPT: it is in the
    prompt; IS_STOP: it is a stop token.
    bias: [P, V] float32, added; -inf forbids the token, 0 leaves it alone.
    repetition, frequency, presence: [P] float32; 1, 0 and 0 are off.
    quiet: [P] int32, tokens still to be emitted before a stop token may come; 0 or less: none.
    recent: [P, LENGTH - 1] int32, the last tokens of prompt and output, the latest first; -1 beyond
    the beginning.
    phrases: [P, PHRASES, LENGTH] int32, forbidden sequences of two or more tokens, the last token
    at index 0, the one before it at 1 and so on; -1 beyond the beginning. An unused one is all -1.
    active: [P] bool. Where it is False nothing else of the place is read or written: its rows stay
    as they are. Where it is True all of the above must have been set.
    """

    words: Tensor
    bias: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    quiet: Tensor
    recent: Tensor
    phrases: Tensor
    active: Tensor


def empty_edits(places: int, vocab: int, device: torch.device | str = "cpu") -> EditState:
    """The state of places that edit nothing; 8 bytes a place and token."""

    def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full((places, *shape), value, dtype=dtype, device=device)

    return EditState(
        words=full(0, torch.int32, vocab),
        bias=full(0, torch.float32, vocab),
        repetition=full(1, torch.float32),
        frequency=full(0, torch.float32),
        presence=full(0, torch.float32),
        quiet=full(0, torch.int32),
        recent=full(-1, torch.int32, LENGTH - 1),
        phrases=full(-1, torch.int32, PHRASES, LENGTH),
        active=full(0, torch.bool),
    )


def edit_logits(
    logits: Tensor,
    state: EditState,
    places: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    depths: Tensor,
) -> Tensor:
    """A new [B N, V] float32: logits [B N, V] float32 of B trees of N <= 64 rows, edited.

    places: [B] int64, each tree's place. tokens, depths: [B, N] int64 as in kernels/tree_build, the
    root in row 0; ancestors: [B, N] int64 as in kernels/tree_mask. The text before what row i
    chooses is all that its place remembers, the tree's root included, and the tokens of the rows
    j >= 1 with bit j of ancestors[b, i], by rising depth.

    With n = times emitted, those rows included, a logit x becomes, in float32, each operation
    rounded by itself and left out where its setting is off:
        repetition r   x / r if x > 0, else x * r, of tokens emitted or in the prompt
        frequency f    x - f * n, of tokens emitted
        presence p     x - p, of tokens emitted
        bias           x + bias
    and -inf where bias is -inf, where a stop token comes too early, and where the token would
    complete a forbidden phrase. A logit that is not finite stays as it is, so that a broken row is
    still seen. A row's result depends on that row, its place and its path alone, to the bit; it is
    the same on every device. Rows of padding come out finite or not, and mean nothing.
    """
    rows, vocab = logits.shape
    trees, nodes = tokens.shape
    assert logits.dtype == torch.float32 and rows == trees * nodes, f"logits {list(logits.shape)}"
    assert nodes <= MAX_ROWS, f"{nodes} rows do not fit in a 64-bit word"
    assert places.shape == (trees,) and ancestors.shape == depths.shape == tokens.shape
    assert all(one.dtype == torch.int64 for one in (places, tokens, ancestors, depths))
    _check_state(state, vocab)
    given = (logits, state, places, tokens, ancestors, depths)
    return _launch_edits(*given) if has_kernel(logits) else reference.edit_logits(*given)


def remember(state: EditState, places: Tensor, emitted: Tensor, lengths: Tensor) -> None:
    """Write into `state` that each place b emitted the first lengths[b] of emitted[b].

    places, lengths: [B] int64; emitted: [B, L] int64. Counts, recent and quiet change. Where the
    length is 0 nothing does, and such a place may be given more than once. One launch on CUDA.
    """
    assert emitted.ndim == 2 and places.shape == lengths.shape == emitted.shape[:1]
    assert places.dtype == emitted.dtype == lengths.dtype == torch.int64
    _check_state(state, state.words.shape[1])
    if has_kernel(emitted):
        _launch_remember(state, places, emitted, lengths)
    else:
        reference.remember(state, places, emitted, lengths)


def _check_state(state: EditState, vocab: int) -> None:
    """The kernels take every tensor to lie in one piece."""
    count, whole, real = len(state.words), torch.int32, torch.float32
    kinds = {
        "words": (whole, (vocab,)),
        "bias": (real, (vocab,)),
        "repetition": (real, ()),
        "frequency": (real, ()),
        "presence": (real, ()),
        "quiet": (whole, ()),
        "recent": (whole, (LENGTH - 1,)),
        "phrases": (whole, (PHRASES, LENGTH)),
        "active": (torch.bool, ()),
    }
    for name, (dtype, shape) in kinds.items():
        value = getattr(state, name)
        assert value.shape == (count, *shape) and value.dtype == dtype, f"{name} {value.shape}"
        assert value.is_contiguous(), name


CHUNK = 2048
"""Tokens a program."""


def _launch_edits(
    logits: Tensor,
    state: EditState,
    places: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    chunk: int = CHUNK,
    warps: int = 8,
) -> Tensor:
    """edit_logits by the kernel. Neither chunk nor warps changes a bit."""
    from triton import next_power_of_2

    from kdtree_engine.kernels.logit_edits.kernel import edit_kernel

    rows, vocab = logits.shape
    nodes = tokens.shape[1]
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return out
    # a chunk's rows run side by side, so that their place's counts and biases come from memory once
    edit_kernel[(rows, -(-vocab // chunk))](
        logits, out, *vars(state).values(), places.contiguous(), tokens.contiguous(),
        ancestors.contiguous(), depths.contiguous(), vocab, logits.stride(0), nodes,
        CHUNK=chunk, NP=next_power_of_2(nodes), PHRASES=PHRASES, LENGTH=LENGTH,
        IN_PROMPT=IN_PROMPT, IS_STOP=IS_STOP, MOST_COUNTED=MOST_COUNTED, num_warps=warps,
        # a product and the difference after it are rounded one by one, as in the reference
        enable_fp_fusion=False, **launch_options(logits),
    )  # fmt: skip
    return out


def _launch_remember(state: EditState, places: Tensor, emitted: Tensor, lengths: Tensor) -> None:
    from triton import next_power_of_2

    from kdtree_engine.kernels.logit_edits.kernel import remember_kernel

    trees, most = emitted.shape
    if emitted.numel() == 0:
        return
    remember_kernel[(trees,)](
        state.words, state.quiet, state.recent, state.active, places.contiguous(),
        emitted.contiguous(), lengths.contiguous(), state.words.shape[1], most,
        MOST=next_power_of_2(most), LENGTH=LENGTH, num_warps=1, **launch_options(emitted),
    )  # fmt: skip


__all__ = [
    "IN_PROMPT",
    "IS_STOP",
    "LENGTH",
    "MOST_COUNTED",
    "PHRASES",
    "EditState",
    "edit_logits",
    "empty_edits",
    "remember",
]
