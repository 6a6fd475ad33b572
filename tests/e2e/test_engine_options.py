"""What a user can get wrong: one clear line each, from Python and from the shell."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_tools import (
    CheckpointMaker,
    copy,
    edit,
    replace_tensors,
    stored_tensors,
    write_byte_tokenizer,
)

from e2e.helpers import greedy, load, plain, prompt, run
from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints import open_model
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.engine import build, memory
from kdtree_engine.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    KDTreeError,
    OptionError,
    TokenizerError,
)
from kdtree_engine.kernels.linear import ColumnBlocks
from kdtree_engine.kernels.rope import RopeTable
from kdtree_engine.model import Kimi, load_target

CUDA = torch.cuda.is_available()


@pytest.fixture
def folder(checkpoint: CheckpointMaker) -> Path:
    return checkpoint("k2.6", drafter=True)


def refused(kind: type[KDTreeError], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------ options of LLM

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tree_nodes": 64}, "tree_nodes 64 must be a number of nodes from 0 to 63, or chain:N"),
    ({"tree_nodes": -1}, "tree_nodes -1"),
    ({"tree_nodes": 1.5}, "tree_nodes 1.5"),
    ({"tree_nodes": True}, "tree_nodes True"),
    ({"tree_nodes": "chain:x"}, "tree_nodes 'chain:x'"),
    ({"tree_nodes": "chain:64"}, "tree_nodes 'chain:64'"),
    ({"tree_nodes": "chain:"}, "tree_nodes 'chain:'"),
    ({"tree_nodes": ""}, "tree_nodes ''"),
    ({"tree_nodes": "\u0663"}, "tree_nodes"),
    ({"device": "tpu"}, "device 'tpu' is not one of auto, cpu, cuda, cuda:N"),
    ({"device": ""}, "device ''"),
    ({"dtype": "int8"}, "dtype 'int8' is not one of auto, float32, bfloat16"),
    ({"prefill_chunk": 0}, "prefill_chunk 0 must be 1 or more"),
    ({"cache_pages": 0}, "cache_pages 0 must be 1 or more"),
    ({"max_requests": -3}, "max_requests -3 must be 1 or more"),
    ({"drafter": "eagle"}, "drafter 'eagle' is neither a folder nor one of"),
    ({"drafter": "/nowhere"}, "drafter '/nowhere' is neither"),
]


@pytest.mark.parametrize(
    ("options", "message"), OPTIONS, ids=["-".join(map(str, one.items())) for one, _ in OPTIONS]
)
def test_wrong_options(options: dict[str, Any], message: str, folder: Path) -> None:
    refused(OptionError, re.escape(message), lambda: LLM(folder, **{"device": "cpu", **options}))


@pytest.mark.skipif(CUDA, reason="there is a CUDA device here")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_cuda_without_a_gpu(device: str, folder: Path) -> None:
    refused(
        OptionError, "torch sees no CUDA GPU; use --device cpu", lambda: LLM(folder, device=device)
    )


@pytest.mark.parametrize("device", ["cpu:1", "cpux", "cuda:x", "cudaX"])
def test_odd_devices(device: str, folder: Path) -> None:
    refused(OptionError, "device", lambda: LLM(folder, device=device))


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens 0 must be 1 or more"),
    ({"temperature": -0.5}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 2.0}, "min_p"),
    ({"max_tokens": 2.5}, "max_tokens 2.5 must be an integer"),
    ({"max_tokens": None}, "max_tokens None must be an integer"),
    ({"max_tokens": True}, "max_tokens True must be an integer"),
    ({"temperature": "a"}, "temperature 'a' must be a number"),
    ({"top_k": 1.5}, "top_k 1.5 must be an integer or None"),
    ({"seed": 1.5}, "seed 1.5 must be an integer or None"),
    ({"stop_token_ids": 5}, "stop_token_ids 5 must be a list of token ids"),
    ({"stop_token_ids": ("x",)}, "must be a list of token ids"),
]


@pytest.mark.parametrize(
    ("settings", "message"), SETTINGS, ids=["-".join(map(str, one.items())) for one, _ in SETTINGS]
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    refused(OptionError, message, lambda: SamplingParams(**settings))


# ----------------------------------------------------------------------------------- prompts


def test_a_folder_without_tokenizer_refuses_text(folder: Path) -> None:
    llm = load(folder)
    refused(
        TokenizerError, "has no tokenizer.*takes token ids, not text", lambda: llm.generate("a")
    )
    refused(TokenizerError, "no tokenizer", lambda: llm.generate([[1, 2], "a"], greedy(2)))
    refused(TokenizerError, "no tokenizer", lambda: next(llm.stream("a")))
    assert not llm.engine.has_work
    out = run(llm, [1, 2], greedy(3))
    assert out.text == "" and len(out.token_ids) == 3


def test_prompts_in_every_form(folder: Path) -> None:
    """One prompt or several; numpy's integers are integers."""
    llm, ids = load(folder), prompt(9)
    truth = plain(folder, ids, greedy(4))
    forms: list[Any] = [ids, tuple(ids), [ids], (tuple(ids),), [np.array(ids)], np.array(ids)]
    for form in forms:
        assert [out.token_ids for out in llm.generate(form, greedy(4))] == [truth]
    assert [len(out.token_ids) for out in llm.generate([ids, ids], [greedy(4), greedy(2)])] == [
        4,
        2,
    ]
    refused(OptionError, "2 prompts came with 1", lambda: llm.generate([ids, ids], [greedy(4)]))
    refused(OptionError, "mix token ids with texts", lambda: llm.generate([1, "a"], greedy(4)))
    refused(OptionError, "token 1.5 is not an integer", lambda: llm.generate([[1, 1.5]], greedy(4)))
    refused(OptionError, "token None is not an integer", lambda: llm.logits([None]))
    refused(OptionError, "empty", lambda: llm.generate([[]], greedy(4)))
    assert not llm.engine.has_work


def test_a_vocabulary_of_another_size_is_refused(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """Otherwise a token without text would end the run in the middle."""
    model = copy(checkpoint("k2.6", dims=Dims(vocab_size=600)), tmp_path / "model")
    write_byte_tokenizer(model)
    refused(TokenizerError, "512 tokens, but the model 600", lambda: load(model))


def test_a_broken_tokenizer_is_an_error_not_an_absence(folder: Path, tmp_path: Path) -> None:
    model = copy(folder, tmp_path / "model")
    (model / "tiktoken.model").write_text("not base64 !!\n")
    refused(TokenizerError, r"tiktoken\.model", lambda: load(model))


# --------------------------------------------------------------------------------- the command


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kdtree_engine.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@dataclass(frozen=True)
class Damage:
    """One way in which a folder is wrong, and a piece of the line that says so."""

    name: str
    apply: Callable[[Path], None]
    kind: type[KDTreeError]
    message: str
    arguments: tuple[str, ...] = ("--prompt-ids", "1,2,3")


def truncate(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def reshape(model: Path) -> None:
    name = "language_model.model.layers.2.self_attn.o_proj.weight"
    replace_tensors(model, {name: stored_tensors(model)[name][:, :-1].contiguous()})


DAMAGES = (
    Damage("no folder", shutil.rmtree, CheckpointError, "model"),
    Damage("no config", lambda m: (m / "config.json").unlink(), ConfigError, "config.json"),
    Damage(
        "no weights", lambda m: (m / "model.safetensors").unlink(), CheckpointError, "safetensors"
    ),
    Damage(
        "missing key",
        lambda m: edit(m, {"text_config.kv_lora_rank": None}),
        ConfigError,
        "kv_lora_rank",
    ),
    Damage(
        "unknown architecture",
        lambda m: edit(m, {"architectures": ["Llama"]}),
        ConfigError,
        "Llama",
    ),
    Damage(
        "unknown quantization",
        lambda m: edit(m, {"text_config.quantization_config.quant_method": "gptq"}),
        ConfigError,
        "gptq",
    ),
    Damage("truncated", truncate, CheckpointError, "model.safetensors"),
    Damage("wrong shape", reshape, CheckpointError, "o_proj.weight is"),
    Damage("not json", lambda m: (m / "config.json").write_text("{"), ConfigError, "config.json"),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=[damage.name for damage in DAMAGES])
def test_damaged_folders(damage: Damage, folder: Path, tmp_path: Path) -> None:
    model = copy(folder, tmp_path / "model")
    damage.apply(model)
    refused(damage.kind, re.escape(damage.message), lambda: load(model))


COMMANDS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], str]] = {
    "truncated": (truncate, ("--prompt-ids", "1,2"), "model.safetensors"),
    "wrong shape": (reshape, ("--prompt-ids", "1,2"), "o_proj"),
    "text without tokenizer": (lambda m: None, ("--prompt", "hello"), "no tokenizer"),
    "wrong option": (lambda m: None, ("--prompt-ids", "1,2", "--tree-nodes", "64"), "tree"),
    "token out of range": (lambda m: None, ("--prompt-ids", "1,999"), "token 999"),
    "wrong drafter": (
        lambda m: edit(m / "drafter", {"dflash_config.mask_token_id": 999}),
        ("--prompt-ids", "1,2", "--drafter", "DRAFTER"),
        "mask_token_id 999",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_fails_in_one_line(name: str, folder: Path, tmp_path: Path) -> None:
    damage, arguments, message = COMMANDS[name]
    model = copy(folder, tmp_path / "model")
    damage(model)
    arguments = tuple(str(model / "drafter") if one == "DRAFTER" else one for one in arguments)
    done = command("generate", model, *arguments, "--device", "cpu")
    assert done.returncode in (1, 2), done
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_the_command_writes_json(folder: Path) -> None:
    ids = prompt(20)
    done = command(
        "generate", folder, "--prompt-ids", ",".join(map(str, ids)), "--max-tokens", "9", "--json",
        "--drafter", folder / "drafter", "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    truth = plain(folder, ids, SamplingParams(max_tokens=9))
    assert (out["token_ids"], out["finish_reason"]) == (truth, "length")
    assert out["stats"]["tokens"] == 9


def test_capacity_through_the_api(folder: Path) -> None:
    llm = load(folder, cache_pages=1)
    refused(CapacityError, "needs 2 cache pages", lambda: llm.generate(prompt(60), greedy(6)))


def test_settings_that_no_tensor_holds(folder: Path) -> None:
    """A top_k beyond 64 bits keeps everything; a stop token beyond the vocabulary is refused."""
    llm = LLM(folder, drafter="none", tree_nodes=0, device="cpu")
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=1)
    [want] = llm.generate([5, 6], params)
    [got] = llm.generate([5, 6], replace(params, top_k=2**70))
    assert got.token_ids == want.token_ids
    wrong = replace(params, stop_token_ids=(10**9,))
    refused(OptionError, "stop token 1000000000 is outside", lambda: llm.generate([5], wrong))
    llm.engine.check_integrity()


def test_stop_tokens_in_any_container() -> None:
    for given, kept in ((None, ()), ([3, 4], (3, 4)), ((one for one in (5,)), (5,))):
        assert SamplingParams(stop_token_ids=given).stop_token_ids == kept  # type: ignore[arg-type]


def test_arguments_of_a_wrong_kind(folder: Path) -> None:
    llm = LLM(folder, drafter="none", tree_nodes=0, device="cpu")
    for call in (lambda: llm.generate([5], {"max_tokens": 3}), lambda: next(llm.stream([5], 3))):  # type: ignore[arg-type]
        refused(OptionError, "must be SamplingParams", call)
    refused(OptionError, "model 5 must be a folder", lambda: LLM(5))  # type: ignore[arg-type]
    refused(OptionError, "device None must be a text", lambda: LLM(folder, device=None))  # type: ignore[arg-type]
    refused(OptionError, "dtype torch.float32", lambda: LLM(folder, dtype=torch.float32))  # type: ignore[arg-type]
    ids = [5, 6, 7]
    assert torch.equal(llm.logits(torch.tensor(ids)), llm.logits(ids))  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [7, None, 1.5])
def test_prompts_of_a_wrong_kind(prompts: Any, folder: Path) -> None:
    llm = LLM(folder, drafter="none", tree_nodes=0, device="cpu")
    refused(OptionError, "prompts must be a text, token ids", lambda: llm.generate(prompts))
    assert llm.generate(torch.tensor([5, 6]), SamplingParams(max_tokens=2))[0].prompt_tokens == 2


def test_memory_is_asked_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    config = open_model(folder).config
    dense, experts = memory.parameters(config)
    assert dense + experts == sum(
        weight.numel() for weight in weights_of(load_target(open_model(folder), torch.float32, cpu))
    )
    assert memory.weight_bytes(config, torch.float32, cpu) == 4 * (dense + experts)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100_000)
    monkeypatch.setattr(build, "load_target", None)  # would fail if it were reached
    refused(CapacityError, "the weights take", lambda: LLM(folder, device="cpu"))
    monkeypatch.undo()
    assert memory.free_bytes(cpu) is None or memory.free_bytes(cpu) > 0
    huge = 10**12
    refused(CapacityError, f"cache_pages {huge} take", lambda: LLM(folder, cache_pages=huge))


def weights_of(target: Kimi) -> list[torch.Tensor]:
    """Every weight of a loaded network, column blocks without their filling."""

    def collect(value: object) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, ColumnBlocks):
            return [value.matrix()]
        if isinstance(value, tuple):
            return [tensor for item in value for tensor in collect(item)]
        if not is_dataclass(value) or isinstance(value, RopeTable):
            return []
        return [t for one in fields(value) for t in collect(getattr(value, one.name))]

    return collect(target)


def test_tree_nodes_of_thousands_of_digits(folder: Path) -> None:
    for value in ("9" * 5000, "chain:" + "9" * 5000):
        refused(OptionError, "from 0 to 63", lambda v=value: LLM(folder, tree_nodes=v))


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert build.resolve_device("auto").type == build.resolve_device("cuda:0").type == "cuda"
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    for device in ("auto", "cuda", "cuda:0"):
        with pytest.raises(OptionError, match="pip install triton"):
            build.resolve_device(device)
    assert build.resolve_device("cpu").type == "cpu"
