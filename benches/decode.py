"""Decoding speed of the packaged model on held-out Python: plain, chain, trees, transformers.

    python benches/decode.py [--device auto] [--threads 2] [--write-docs] [--quick] [--no-peer]

Nothing is timed before the gate has passed: over all prompts, several at a time, every setting must
give plain decoding's tokens, and for a few prompts its logits' bits; a timed run that gives other
tokens ends the bench as well. Settings are timed one request at a time and interleaved: each round
is one prompt through every setting, in random order. Acceptance is taken over all prompts.

On CUDA the engine decodes in bfloat16 by captured graphs. All of them are captured in a warm-up of
everything that is timed; one more while timing ends the bench. transformers runs on the CPU only.

One JSON line a row goes to benches/results/decode.jsonl; `--write-docs` puts the tables of the last
run on each kind of device into docs/benchmarks.md (with `--no-run`, without measuring).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also when imported from elsewhere

import gate
import report
from peer import Peer
from settings import (
    LARGEST,
    NATURAL,
    NGRAM,
    PLAIN,
    TREES,
    Decoded,
    Machine,
    Prompt,
    Setting,
    acceptance,
    decode,
    load_prompts,
    read_seconds,
    weight_bytes,
)

from kdtree_engine import LLM
from kdtree_engine.engine.build import packaged_model, resolve_device, resolve_dtype
from kdtree_engine.engine.measure.timing import check_machine, measure_machine
from kdtree_engine.log import progress

RESULTS = Path(__file__).resolve().parent / "results" / "decode.jsonl"
PEER = "transformers"
Arm = Setting | str  # what a round times: a setting, or "transformers, EXPERTS"


@dataclass(frozen=True)
class Plan:
    """How much is run. each: prompts a package. timed: of these, how many are timed too."""

    machines: tuple[Machine, ...] = (PLAIN, *TREES, NGRAM)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    timed_temperatures: tuple[float, ...] = (0.0, 1.0)
    each: int = 6
    timed: int = 3
    prompt_tokens: int = 200
    new_tokens: int = 128
    repeats: int = 3
    bits: int = 2  # prompts whose logits are compared
    peer: bool = True
    device: str = "cpu"

    def settings(self, temperatures: tuple[float, ...]) -> list[Setting]:
        """Every machine at every temperature."""
        return [Setting(machine, t) for t in temperatures for machine in self.machines]

    @property
    def natural(self) -> tuple[Machine, ...]:
        """Plain decoding without the contract's row counts, where products have such."""
        return (NATURAL,) if self.device == "cpu" else ()

    def on_cuda(self) -> Plan:
        """The same on a GPU: steps are short, so all temperatures are timed, and 63 nodes too."""
        machines = self.machines
        if TREES[-1] in machines:
            machines = (*machines[:-1], LARGEST, machines[-1])
        return replace(
            self,
            machines=machines,
            timed_temperatures=self.temperatures,
            peer=False,
            device="cuda",
        )


QUICK = Plan(
    machines=(PLAIN, TREES[2], NGRAM),
    temperatures=(0.0, 1.0),
    each=1,
    timed=1,
    prompt_tokens=40,
    new_tokens=12,
    repeats=1,
    bits=1,
)


class Bench:
    """The engines, the prompts, and what the gate has seen."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        wanted = (*plan.machines, *plan.natural)
        self.llms: dict[Machine, LLM] = {one: one.load(plan.device) for one in wanted}
        tokenizer = self.llms[PLAIN].tokenizer
        assert tokenizer is not None
        self.tokenizer = tokenizer
        self.prompts = load_prompts(tokenizer, plan.each, plan.prompt_tokens)
        packages = len({prompt.package for prompt in self.prompts})
        self.timed = self.prompts[: plan.timed * packages]
        self.expected: dict[float, list[list[int]]] = {}
        self.logits: dict[tuple[float, int], torch.Tensor] = {}  # plain decoding's
        self.acceptance: dict[Setting, dict[str, float]] = {}

    def pass_gate(self) -> None:
        """Compare every setting with plain decoding; keeps the tokens and the acceptance."""
        plan = self.plan
        settings = plan.settings(plan.temperatures)
        with progress("gate", len(settings)) as meter:
            for setting in settings:
                outputs = self.llms[setting.machine].generate(
                    [prompt.tokens for prompt in self.prompts],
                    [setting.params(prompt.index, plan.new_tokens) for prompt in self.prompts],
                )
                found = [out.token_ids for out in outputs]
                expected = self.expected.setdefault(setting.temperature, found)  # plain is first
                gate.require_equal_tokens(str(setting), expected, found)
                self._compare_logits(setting)
                self.acceptance[setting] = acceptance(self.tokenizer, outputs)
                meter.advance(note=str(setting))

    def _compare_logits(self, setting: Setting) -> None:
        if setting.machine == PLAIN:
            return
        for prompt in self.prompts[: self.plan.bits]:
            params = setting.params(prompt.index, self.plan.new_tokens)
            key = (setting.temperature, prompt.index)
            if key not in self.logits:
                self.logits[key] = gate.decoded_logits(self.llms[PLAIN], prompt.tokens, params)
            found = gate.decoded_logits(self.llms[setting.machine], prompt.tokens, params)
            gate.require_equal_logits(str(setting), self.logits[key], found)

    def measure(self, peer: Peer | None, experts: list[str]) -> dict[Arm, list[Decoded]]:
        """Time every arm on every timed prompt, `repeats` times."""
        plan = self.plan
        arms: list[Arm] = [*plan.settings(plan.timed_temperatures)]
        arms += [Setting(machine, 0.0) for machine in plan.natural]
        arms += [f"{PEER}, {name}" for name in experts]
        rounds = [prompt for _ in range(plan.repeats) for prompt in self.timed]
        # Not counted. Decoding is the same each time, so this captures every graph of the rounds.
        warmup = self.timed[:1] if plan.device == "cpu" else self.timed
        with progress("timing", len(arms) * (len(rounds) + len(warmup))) as meter:

            def one(arm: Arm, prompt: Prompt) -> Decoded:
                result = self._time(arm, prompt, peer)
                meter.advance(note=str(arm))
                return result

            gate.interleaved(arms, warmup, one)
            captured = self._graphs()
            measured = gate.interleaved(arms, rounds, one)
        if self._graphs() != captured:
            raise gate.GateError("void: a graph was captured while others were timed")
        return measured

    def _graphs(self) -> int:
        """How many graphs the engines have captured."""
        return sum(len(llm.engine.runner._graphs) for llm in self.llms.values())

    def _time(self, arm: Arm, prompt: Prompt, peer: Peer | None) -> Decoded:
        new = self.plan.new_tokens
        if isinstance(arm, str):
            assert peer is not None
            tokens, seconds = peer.decode(prompt.tokens, new, arm.removeprefix(f"{PEER}, "))
            return Decoded(tokens, new - 1, seconds, {})
        llm = self.llms[arm.machine]
        found = decode(llm, arm.machine, prompt.tokens, arm.params(prompt.index, new))
        if not arm.machine.natural:
            want = self.expected[arm.temperature][prompt.index]
            gate.require_equal_tokens(f"the timed {arm}", [want], [found.tokens])
        return found

    def row(self, arm: Arm, measured: dict[Arm, list[Decoded]], floor: float) -> dict[str, Any]:
        """The figures of one arm; times are medians over the repeats, summed over the prompts."""
        temperature = 0.0 if isinstance(arm, str) else arm.temperature
        runs, plain = measured[arm], measured[Setting(PLAIN, temperature)]
        count = len(self.timed)
        seconds = sum(statistics.median(r.seconds for r in runs[i::count]) for i in range(count))
        tokens = sum(len(r.tokens) - 1 for r in runs[:count])
        steps = statistics.fmean(r.steps for r in runs) * count
        phases = {
            name: round(statistics.median(1e3 * r.phases[name] / r.steps for r in runs), 3)
            for name in runs[0].phases
            if any(r.phases[name] for r in runs)  # a captured step has one phase
        }
        same = sum(
            r.tokens == self.expected[temperature][p.index]
            for r, p in zip(runs, self.timed, strict=False)
        )
        return {
            **_name(arm),
            **({} if isinstance(arm, str) else self.acceptance.get(arm, {})),
            "timed_tokens_per_step": round(tokens / steps, 3),
            "tokens_per_s": round(tokens / seconds, 2),
            "ms_per_token": round(1e3 * seconds / tokens, 3),
            "ms_per_step": round(1e3 * seconds / steps, 3),
            "phases_ms_per_step": phases,
            "speed_over_plain": _rounded(
                gate.paired_ratio(_by_repeat(plain, count), _by_repeat(runs, count))
            ),
            "floor_ms_per_step": round(1e3 * floor, 3),
            "times_floor": round(seconds / steps / floor, 2),
            "outputs_equal_to_plain": f"{same}/{count}",
        }


def _name(arm: Arm) -> dict[str, Any]:
    if isinstance(arm, str):
        return {"row": arm, "drafter": None, "tree_nodes": None, "temperature": 0.0}
    machine = arm.machine
    return {
        "row": str(machine),
        "drafter": machine.drafter,
        "tree_nodes": machine.tree_nodes,
        "temperature": arm.temperature,
    }


def _by_repeat(runs: list[Decoded], count: int) -> list[float]:
    """Seconds over all prompts, one sum a repeat."""
    return [
        sum(r.seconds for r in runs[start : start + count]) for start in range(0, len(runs), count)
    ]


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def floor_of(bench: Bench, facts: dict[str, Any]) -> tuple[int, float]:
    """Bytes that a plain step must read, and the seconds for it at this machine's bandwidth."""
    config = bench.llms[PLAIN].engine.target.config
    if bench.plan.device == "cpu":
        size = weight_bytes(config, 4, packed=False)
        return size, read_seconds(size)
    machine = measure_machine(torch.device("cuda"))
    check_machine(machine)
    facts["copy_tbs"] = round(machine.bandwidth_tbs, 3)
    size = weight_bytes(config, 2, packed=config.quantization == "int4")
    return size, size / (machine.bandwidth_tbs * 1e12)


def run(plan: Plan, commit: str | None = None) -> list[dict[str, Any]]:
    """Gate, time, and give the rows of the table."""
    started = time.perf_counter()
    facts = gate.environment_facts(commit)
    bench = Bench(plan)
    bench.pass_gate()
    peer = Peer(packaged_model() / "target") if plan.peer else None
    experts: list[str] = []
    if peer is not None:
        best, probe = peer.fastest(bench.timed[0].tokens, min(64, plan.new_tokens))
        experts = list(dict.fromkeys((peer.default, best)))
        facts["transformers_experts"] = {"default": peer.default, "ms_per_token": probe}
        facts["transformers_attention"] = peer.attention
    else:
        facts["transformers_left_out"] = (
            "asked to" if plan.device == "cpu" else "it is compared on the CPU, in float32"
        )
    size, floor = floor_of(bench, facts)
    measured = bench.measure(peer, experts)
    rows = [bench.row(arm, measured, floor) for arm in measured]
    untimed = [s for s in bench.acceptance if s not in measured]
    for setting in untimed:
        rows.append({**_name(setting), **bench.acceptance[setting]})
    facts["load_after"] = round(os.getloadavg()[0], 2)
    common = {
        "bench": "decode",
        "run": facts["date"],
        "gate": "passed",
        "top_p": 1.0,
        "device": plan.device,
        "dtype": str(resolve_dtype("auto", torch.device(plan.device))).removeprefix("torch."),
        "prompts": len(bench.prompts),
        "timed_prompts": len(bench.timed),
        "prompt_tokens": plan.prompt_tokens,
        "new_tokens": plan.new_tokens,
        "repeats": plan.repeats,
        "weight_bytes": size,
        "bench_seconds": round(time.perf_counter() - started, 1),
        "environment": facts,
    }
    return [{**row, **common} for row in rows]


def parse() -> argparse.Namespace:
    """Options; what is not given comes from the plan."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--commit", help="what to record where the source has no git history")
    parser.add_argument("--threads", type=int, help="torch's threads (default: torch decides)")
    parser.add_argument("--quick", action="store_true", help="a few tokens, to see that it works")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--timed", type=int, help="timed prompts of each package")
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--out", type=Path, help=f"JSON lines (default {RESULTS.name}; quick none)")
    parser.add_argument("--write-docs", action="store_true", help="update docs/benchmarks.md")
    parser.add_argument("--no-run", action="store_true", help="only show the last run again")
    return parser.parse_args()


def main() -> None:
    """Run, append, print, and write the table."""
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    out = args.out or (None if args.quick else RESULTS)
    if args.no_run:
        rows = report.last_run(out or RESULTS)
    else:
        given = {
            name: value
            for name in ("repeats", "timed", "new_tokens")
            if (value := getattr(args, name)) is not None
        }
        base = QUICK if args.quick else Plan()
        if resolve_device(args.device).type == "cuda":
            base = base.on_cuda()
        plan = replace(base, peer=base.peer and not args.no_peer, **given)
        rows = run(plan, args.commit)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in rows)
    print(report.table(rows))
    if args.write_docs:
        report.write_docs(out or RESULTS)


if __name__ == "__main__":
    main()
