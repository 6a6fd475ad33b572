"""Text that the target writes itself, as training data for its drafter (runs on the GPU machine).

A drafter is judged on what the target says, not on what people wrote: prompts come from the corpus,
everything after them from transformers' `generate` on the packaged weights, a third of the batches
greedy, a third at temperature 0.7 and a third at 1.0. Written as one .npy of token ids [N, length].
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from export import load as load_target
from tokens import load as load_tokens

TEMPERATURES = (0.0, 0.7, 1.0)


def prompts(
    tokens: np.ndarray, count: int, length: int, random: np.random.Generator
) -> torch.Tensor:
    """[count, length] windows of the corpus, half of them at the beginning of a document."""
    starts = np.flatnonzero(tokens == 2817) + 1
    starts = starts[starts < len(tokens) - length]
    any_place = random.integers(0, len(tokens) - length, count)
    chosen = np.where(random.random(count) < 0.5, random.choice(starts, count), any_place)
    return torch.from_numpy(tokens[chosen[:, None] + np.arange(length)].astype(np.int64))


@torch.inference_mode()
def main() -> None:
    """Generate until the time is up."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path, help="folder for generated.npy and corpus.npy")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--corpus-tokens", type=int, default=6_000_000)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    tokens = load_tokens(args.corpus, args.target / "tiktoken.model", 14, None)["train"]
    random = np.random.default_rng(0)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = len(tokens) // args.length
    picked = random.choice(rows, min(rows, args.corpus_tokens // args.length), replace=False)
    sample = tokens[picked[:, None] * args.length + np.arange(args.length)]
    np.save(args.out / "corpus.npy", sample.astype(np.uint16))
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = load_target(args.target).to(args.device, dtype)
    for name, buffer in model.named_buffers():  # the router's bias stays float32
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()
    made: list[np.ndarray] = []
    begun, spent, index = time.monotonic(), 0.0, 0
    while index == 0 or time.monotonic() - begun + spent < args.seconds:
        round_begun = time.monotonic()
        temperature = TEMPERATURES[index % len(TEMPERATURES)]
        batch = prompts(tokens, args.batch, args.prompt, random).to(args.device)
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=temperature > 0,
            max_new_tokens=args.length - args.prompt,
            min_new_tokens=args.length - args.prompt,
            pad_token_id=3071,
            **({"temperature": temperature, "top_k": 0} if temperature else {}),
        )
        made.append(out.cpu().numpy().astype(np.uint16))
        spent, index = time.monotonic() - round_begun, index + 1
        print(
            f"batch {index}, temperature {temperature}: {out.numel()} tokens in {spent:.1f} s",
            flush=True,
        )
        np.save(args.out / "generated.npy", np.concatenate(made))


if __name__ == "__main__":
    main()
