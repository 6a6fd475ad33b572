"""Every kernel under compute-sanitizer: memcheck (bounds) and racecheck (shared memory).

    python benches/sanitize.py [--tools memcheck,racecheck] [--parts NAME,...] [--limit 200]

The load is a short run at small shapes: the packaged model and one rank's share of a tiny K2.6
decode a few tokens plainly, by a tree and by a chain, with and without filters, and operators
outside of a step run once. It runs by itself first, which compiles the kernels and says which were
launched, then under each tool. Operators are launched one by one: under memcheck every tensor is an
allocation of its own, which a graph cannot be.

racecheck's hazards are counted by pairs of source lines, so that those of a kernel whose warps have
roles can be read (docs/exactness.md, "With warps that have roles"); the part `handover` asks what
the tool makes of the least such kernels, right and wrong. It runs on an sm_90 alone, and not unless
it is named.

One JSON file: benches/results/sanitizer.json. Ends with 1 if anything was found or did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also when imported from elsewhere

import gate

HERE = Path(__file__).resolve()
KERNELS = HERE.parents[1] / "src" / "kdtree_engine" / "kernels"
RESULTS = HERE.parent / "results" / "sanitizer.json"
OPTIONS = {
    "memcheck": ["--tool", "memcheck", "--padding", "32"],
    "racecheck": ["--tool", "racecheck", "--racecheck-report", "all"],
    "synccheck": ["--tool", "synccheck"],
}
HAZARD = re.compile(
    r"Potential (\w+) hazard[^\n]*\n=+ +(Read|Write) Thread[^\n]* at (\w+)\+\w+( in \S+)?"
    r"\n=+ +(Read|Write) Thread[^\n]* at \w+\+\w+( in \S+)?"
)
TAIL = 4000  # characters kept of a tool's output
MARK = "launched kernels: "


def launched_kernels(is_hopper: bool = True) -> list[str]:
    """Names of the kernels that the package's operators launch, from their source."""
    jit, launches = set[str](), set[str]()
    for path in sorted(KERNELS.rglob("*.py")):
        if path.name == "hopper.py" and not is_hopper:
            continue
        text = path.read_text(encoding="utf-8")
        jit |= set(re.findall(r"@(?:triton|gluon)\.jit.*\ndef (\w+)", text))
        launches |= set(re.findall(r"(?:^|[\s.])(\w+)\[[^\n]*\]\($", text, re.MULTILINE))
    return sorted(jit & launches)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Launches by kernel name, where Triton launches them."""
    seen: Counter[str] = Counter()
    try:
        from triton import knobs
    except ImportError:
        yield seen
        return

    def note(metadata: Any) -> None:
        seen[str(metadata.get()["name"])] += 1

    knobs.runtime.launch_enter_hook.add(note)
    try:
        yield seen
    finally:
        knobs.runtime.launch_enter_hook.remove(note)


def parts(device: str) -> dict[str, Callable[[], None]]:
    """What can run under the tools."""
    models = {
        f"packaged-{nodes}": partial(_packaged, device, nodes) for nodes in (0, 15, "chain:7")
    }
    there = torch.device(device)
    rest = {"tiny": _tiny, "operators": _operators, "roles": _roles, "fp8": _fp8}
    rest["handover"] = _handover
    return models | {name: partial(run, there) for name, run in rest.items()}


def load(device: str, chosen: str = "") -> Counter[str]:
    """Run parts, those named between commas or all of the engine's; launches by kernel."""
    began, known = time.perf_counter(), parts(device)
    names = chosen.split(",") if chosen else [name for name in known if name != "handover"]
    with torch.inference_mode(), counted() as seen:
        for name in names:
            known[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            _report(name, seen, began)
    return seen


def _report(part: str, seen: Counter[str], began: float) -> None:
    """What has run so far: a tool that is cut off shows how far it came."""
    print(f"{part}: done after {time.perf_counter() - began:.1f} s", flush=True)
    print(MARK + json.dumps(seen), flush=True)


def _packaged(device: str, nodes: int | str) -> None:
    """Prefill, DFlash, a tree and a chain, plain steps; greedy, sampled, and with every filter."""
    from kdtree_engine import LLM, SamplingParams

    settings = [
        SamplingParams(4, ignore_eos=True),
        SamplingParams(4, temperature=1.0, seed=1, ignore_eos=True),
        SamplingParams(
            4, temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, seed=2, ignore_eos=True
        ),
    ]
    prompts = [list(range(40, 40 + length)) for length in (70, 5, 129)]
    llm = LLM(
        device=device, dtype="bfloat16", tree_nodes=nodes, cache_pages=12, max_requests=3,
        eager=True, prefill_chunk=128,
    )  # fmt: skip
    outputs = llm.generate(prompts, settings)
    assert all(out.error is None and len(out.token_ids) == 4 for out in outputs)


def _tiny(device: torch.device) -> None:
    """Steps of many rows over a longer context: other tiles, several blocks of keys."""
    from kdtree_engine.cache import CacheLayout
    from kdtree_engine.engine.measure.decoding import brooms, decoding, random_pool
    from kdtree_engine.engine.measure.shapes import TINY, share
    from kdtree_engine.engine.measure.weights import random_target

    target = random_target(share(TINY, 8), torch.bfloat16, device)
    pool = random_pool(target, CacheLayout(80, 8), torch.bfloat16)
    for requests, rows in ((1, 1), (1, 64), (8, 16)):
        roots, blocks = brooms(requests, rows, target.config.vocab_size)
        one = decoding(target, pool, rows, roots, blocks, 0.6, eager=True)
        one.stand(300)
        one.operators()


def _operators(device: torch.device) -> None:
    """Those that a step does without."""
    from kdtree_engine.kernels.cache_commit import commit_rows
    from kdtree_engine.kernels.gumbel import NoiseWanted, gumbel, noise_bounds
    from kdtree_engine.kernels.logit_edits import cases, edit_logits, remember
    from kdtree_engine.kernels.top_k import token_log_probs
    from kdtree_engine.kernels.tree_mask import tree_mask

    one = torch.arange(5, device=device)
    gumbel(one, one, 1000)
    noise_bounds(NoiseWanted(one, torch.ones(5, device=device), 4, 1000), one)
    tree_mask(torch.tensor([[-1, 0, 0, 1, 3]], device=device))
    layers = [torch.randn(4, 64, 80, device=device) for _ in range(2)]
    commit_rows(layers, one + 10, one + 11)
    for name in ("all", "word"):
        given = cases.inputs(cases.CASES[name], device=device)
        token_log_probs(edit_logits(*given), given.tokens.flatten().clamp(min=0))
        emitted = given.tokens.clamp(min=0)
        remember(given.state, given.places, emitted, given.places + 1)


def _roles(device: torch.device) -> None:
    """Attention at K2.6's widths, by warps with roles; the CPU has no such kernel to watch."""
    from kdtree_engine.kernels.mla_attention import TablePlan, mla_attention
    from kdtree_engine.types import SpanTable

    rows, heads, pages, dtype = 64, 8, 18, torch.bfloat16
    latents = torch.randn(pages, 64, 576, device=device).to(dtype)
    query = torch.randn(rows, heads, 576, device=device).to(dtype)
    masks = torch.tensor([[(2 << row) - 1 for row in range(63)] + [-1]], device=device)
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    slots = 17 * 64 + torch.arange(rows, device=device)
    for context in (0, 64, 1000) if device.type == "cuda" else ():
        contexts = torch.tensor([context], dtype=torch.int32, device=device)
        plan = TablePlan(SpanTable(contexts, table, masks), slots, rows)
        mla_attention(query, latents, plan, 0.1, 512)


def _fp8(device: torch.device) -> None:
    """Products and experts of FP8 weights."""
    from kdtree_engine.kernels.experts import expert_mlp, random_packed_experts
    from kdtree_engine.kernels.linear import product, random_linear
    from kdtree_engine.kernels.router import RouterSettings, route_rows

    weight = random_linear(512, 1024, torch.bfloat16, device, 0.02, quantised=True)
    experts = random_packed_experts(8, 256, 128, 128, device, planes=2)
    settings, bias = RouterSettings(2, 1, 1, True, 1.0), torch.zeros(8, device=device)
    for count in (1, 64) if device.type == "cuda" else ():
        product(torch.randn(count, 1024, device=device).bfloat16(), weight)
        routing = route_rows(torch.randn(8, count, 264, device=device), bias, settings, 128)
        expert_mlp(torch.randn(count, 256, device=device).bfloat16(), routing, experts)


def _handover(device: torch.device) -> None:
    """The least kernels with roles, right and wrong; nothing on other devices."""
    if device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        import handover

        handover.run(device)


def found_in(output: str, kernels: Sequence[str]) -> dict[str, Any]:
    """A tool's own count of errors (racecheck: hazards), the kernels that its report names, and how
    many hazards it lists between which two lines of source.
    """
    report = [line for line in output.splitlines() if line.startswith("=========")]
    counts = [
        int(number)
        for line in report
        for number in re.findall(r"SUMMARY: (\d+) (?:errors?|hazards?)", line)
    ]
    named = Counter(name for line in report for name in kernels if re.search(rf"\b{name}\b", line))
    between = Counter(
        f"{kind} in {kernel}: {verb}{first}, {other}{second}"
        for kind, verb, kernel, first, other, second in HAZARD.findall("\n".join(report))
    )
    return {
        "errors": sum(counts) if counts else None,  # None: it did not come to a summary
        "kernels_named": dict(named),
        "hazards_between": dict(between.most_common()),
        "first_lines": report[:60],
    }


def under(tool: str, args: argparse.Namespace, kernels: Sequence[str]) -> dict[str, Any]:
    """Run the load under a tool; "bare" is none."""
    command = [sys.executable, str(HERE), "--load", "--device", args.device, "--parts", args.parts]
    variables = dict(os.environ)
    if tool != "bare":
        common = ["--target-processes", "application-only", "--print-limit", "50000"]
        common += ["--show-backtrace", "no"]
        command = [args.sanitizer, *OPTIONS[tool], *common, *command]
    if tool == "memcheck":
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    began, late = time.perf_counter(), False
    try:
        done = subprocess.run(
            command, env=variables, timeout=args.limit, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        output = raw if isinstance(raw, str) else raw.decode(errors="replace")
        code, late = -1, True
    seen = {}
    for line in output.splitlines():
        if line.startswith(MARK):
            seen = json.loads(line.removeprefix(MARK))
    result: dict[str, Any] = {
        "tool": tool,
        "exit_code": code,
        "timed_out": late,
        "seconds": round(time.perf_counter() - began, 1),
        "kernels_seen": seen,
        "kernels_not_seen": [name for name in kernels if name not in seen],
        "tail": output[-TAIL:],
    }
    if tool != "bare":
        result |= found_in(output, kernels)
    return result


def clean(result: dict[str, Any], complete: bool) -> bool:
    """Whether a tool came to its end and found nothing; complete: and saw all kernels."""
    missed = result["kernels_not_seen"] if complete else []
    return result["exit_code"] == 0 and not missed and result.get("errors", 0) == 0


def _known(option: str, given: str, names: Iterable[str]) -> None:
    """End with one line where `given`, names between commas, has another than `names`."""
    for name in given.split(",") if given else ():
        if name not in names:
            raise SystemExit(f"{option} {given}: there is no {name}; known are {', '.join(names)}")


def main() -> int:
    """Run the load, or the tools over it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--load", action="store_true", help="only run what the tools watch")
    parser.add_argument("--parts", default="", help="between commas; default: all but handover")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tools", default="memcheck,racecheck", help="also synccheck")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds a tool")
    parser.add_argument("--sanitizer", help="compute-sanitizer, where it is not on the PATH")
    parser.add_argument("--commit", help="what to record where the source has no git history")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    _known("--parts", args.parts, parts(args.device))
    _known("--tools", args.tools, OPTIONS)
    if args.load:
        load(args.device, args.parts)
        return 0
    args.sanitizer = (
        args.sanitizer
        or shutil.which("compute-sanitizer")
        or "/usr/local/cuda/bin/compute-sanitizer"
    )
    if not Path(args.sanitizer).exists():
        raise SystemExit(f"no compute-sanitizer at {args.sanitizer}")
    cuda = args.device == "cuda"
    kernels = launched_kernels(not cuda or torch.cuda.get_device_capability() == (9, 0))
    complete = cuda and not args.parts
    results = []
    for tool in ("bare", *args.tools.split(",")):
        results.append(under(tool, args, kernels))
        short = ("tool", "seconds", "exit_code", "errors", "kernels_not_seen", "kernels_named")
        print(json.dumps({key: results[-1].get(key) for key in short}), flush=True)
        if not clean(results[-1], complete):
            print(results[-1]["tail"][-1500:], flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"kernels": kernels, "parts": args.parts or "all", "tools": results}
        found["environment"] = gate.environment_facts(args.commit)
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if all(clean(result, complete) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
