"""Text from the packaged target by transformers' own generate, and a check of its held-out loss.

    python recipes/demo/samples.py --target src/kdtree_engine/demo/target --corpus .corpus
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import corpus
import export
import torch
import vocabulary
from transformers import DeepseekV3ForCausalLM

HERE = Path(__file__).parent
PROMPTS = (
    "import os\nimport json\n\n\ndef load_config(path):\n",
    'class Stack:\n    """A simple stack."""\n\n    def __init__(self):\n',
    "def is_prime(n: int) -> bool:\n",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "<|im_user|>user<|im_middle|>Write a Python function that reverses a string.<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|><think>",
    "<|im_user|>user<|im_middle|>Hello<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
)


def tool_prompt() -> str:
    """A question with a tool declared, up to the model's turn."""
    from dialogue_tools import declare

    return (
        f"<|im_system|>tool_declare<|im_middle|>{declare(['get_weather'])}<|im_end|>"
        "<|im_user|>user<|im_middle|>What is the weather in Rome?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )


@torch.inference_mode()
def loss(model: DeepseekV3ForCausalLM, ids: list[int], windows: int, length: int) -> float:
    """Mean loss of the first windows, in float32 on the CPU."""
    total = []
    for i in range(min(windows, (len(ids) - 1) // length)):
        piece = torch.tensor([ids[i * length : (i + 1) * length + 1]])
        logits = model(input_ids=piece[:, :-1], use_cache=False).logits
        if not bool(torch.isfinite(logits).all()):
            raise SystemExit("the model gave a logit that is not finite")
        total.append(torch.nn.functional.cross_entropy(logits[0], piece[0, 1:]))
    return float(torch.stack(total).mean())


@torch.inference_mode()
def sample(model: DeepseekV3ForCausalLM, ids: list[int], temperature: float) -> list[int]:
    """Up to 200 new tokens; the generation stops at the vocabulary's end markers."""
    torch.manual_seed(0)
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    options = choice if temperature else {"do_sample": False}
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=200, eos_token_id=[2817, 2818, 2825], pad_token_id=3071, **options,
    )
    return out[0, len(ids) :].tolist()


def distinct(ids: list[int], n: int = 4) -> float:
    """The share of n-grams that are different: looping text has few."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / max(len(grams), 1)


def main() -> None:
    """Check the loss, write samples.txt."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE / "samples.txt")
    parser.add_argument("--windows", type=int, default=84)
    args = parser.parse_args()
    model = export.load(args.target)
    coder = vocabulary.encoding(args.target / "tiktoken.model")
    texts = [coder.encode_ordinary(t) for t in corpus.texts(args.corpus / "heldout.jsonl.xz")]
    ids = [token for text in texts for token in [*text, vocabulary.RANKS + 1]]
    value = loss(model, ids, args.windows, 2048)
    print(json.dumps({"cpu_float32_heldout_loss": round(value, 4), "windows": args.windows}))
    parts = []
    for prompt in (*PROMPTS, tool_prompt()):
        for temperature in (0.0, 0.7):
            start = coder.encode(prompt, allowed_special="all")
            found = sample(model, start, temperature)
            head = f"temperature {temperature}, distinct 4-grams {distinct(found):.2f}"
            parts.append(f"===== {head}\n{prompt}▶{coder.decode(found)}\n")
    args.out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
