"""`kdtree make-checkpoint` and `kdtree train-drafter`: options, messages, exit codes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kdtree_engine import cli, training
from kdtree_engine.checkpoints import check_drafter, open_drafter, open_model
from kdtree_engine.cli.train_drafter import TrainArguments
from kdtree_engine.training import TrainOptions, TrainReport


def test_make_checkpoint_writes_what_the_reader_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    arguments = ["make-checkpoint", str(folder), "--family", "k2.6", "--drafter", "--seed", "3"]
    assert cli.run(arguments) == 0
    expected = f"kdtree: wrote a random k2.6 checkpoint and its drafter to {folder}\n"
    assert capsys.readouterr() == ("", expected)
    target = open_model(folder)
    check_drafter(open_drafter(folder / "drafter").config, target.config)
    # A second run would overwrite a model that someone may need.
    assert cli.run(arguments) == 1
    assert str(folder) in capsys.readouterr().err


@pytest.mark.parametrize("family", ["k2", "k2-thinking", "deepseek-v3"])
@pytest.mark.parametrize("form", ["bf16", "int4", "fp8"])
def test_make_checkpoint_in_every_format(tmp_path: Path, family: str, form: str) -> None:
    arguments = ["make-checkpoint", str(tmp_path), "--family", family, "--format", form]
    assert cli.run(arguments) == 0
    assert open_model(tmp_path).config.quantization == form.replace("bf16", "none")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--family", "gpt"], "'gpt'"),
        (["--format", "fp4"], "'fp4'; there are: bf16, int4, fp8"),
        (["--seed", "-1"], "--seed is -1"),
        (["--seed", str(2**63)], "--seed"),
        (["--seed", "x"], "--seed"),
    ],
)
def test_make_checkpoint_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    assert cli.run(["make-checkpoint", str(tmp_path / "model"), *options]) == 2
    _, err = capsys.readouterr()
    assert named in err
    assert err.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_make_checkpoint_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["make-checkpoint"]) == 2
    assert capsys.readouterr().err.startswith("kdtree: ")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def train(model: Path, data: list[Path], out: Path, options: TrainOptions) -> TrainReport:
        seen.update(model=model, data=data, out=out, options=options)
        return TrainReport(9, 3.4, 18432, 100, 2.5, [0.25, 0.1], 1.3)

    monkeypatch.setattr(training, "train_drafter", train)
    return seen


def test_train_drafter_passes_its_options_on(
    trainer: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "train-drafter m --data a.txt b.txt --data c.txt --out d --steps 9 --block-size 4"
    assert cli.run(arguments.split()) == 0
    assert trainer["model"] == Path("m")
    assert trainer["data"] == [Path("a.txt"), Path("b.txt"), Path("c.txt")]
    assert trainer["out"] == Path("d")
    assert trainer["options"] == TrainOptions(steps=9, block_size=4)
    assert capsys.readouterr() == (
        "",
        "kdtree: 9 steps over 18432 tokens in 3 s, loss 2.500; held out: first guess right 25%, "
        "1.30 tokens/step as a chain; wrote d\n",
    )


def test_train_drafter_has_the_recipes_defaults(trainer: dict[str, Any]) -> None:
    assert cli.run(["train-drafter", "m", "--data", "a.txt"]) == 0
    assert trainer["out"] == Path("drafter")
    assert trainer["options"] == TrainOptions()
    defaults = {one.name: one.default for one in fields(TrainOptions)}
    assert {one.name: one.default for one in fields(TrainArguments)}.items() <= defaults.items()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("train-drafter m --out d", "--data"),
        ("train-drafter m --data --out d", "--data"),
        ("train-drafter --data a.txt --out d", "MODEL"),
        ("train-drafter m --data a.txt --out d --steps few", "--steps"),
    ],
)
def test_train_drafter_misuse(
    trainer: dict[str, Any], capsys: pytest.CaptureFixture[str], arguments: str, named: str
) -> None:
    assert cli.run(arguments.split()) == 2
    assert trainer == {}
    _, err = capsys.readouterr()
    assert named in err
    assert err.count("\n") == 1


def test_a_drafter_in_the_speculators_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    arguments = ["make-checkpoint", str(folder), "--layout", "speculators"]
    assert cli.run(arguments) == 2
    assert "--layout is 'speculators'" in capsys.readouterr().err and not folder.exists()
    assert cli.run([*arguments, "--drafter"]) == 0
    drafter = open_drafter(folder / "drafter")
    check_drafter(drafter.config, open_model(folder).config)
    assert drafter.has_head and drafter.config.num_target_layers is None
