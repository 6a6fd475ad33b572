"""A drafter that names another target is warned of, one that may be the right one is not."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import pytest

from kdtree_engine.checkpoints.revision import drafted_target, revision_warning

VERIFIER = "speculators_config"


def spec(name: Any) -> dict[str, Any]:
    return {VERIFIER: {"verifier": {"name_or_path": name}}}


CACHE = "/home/u/.cache/huggingface/hub/models--{}/snapshots/0a1b2c3d"

NAMES: list[tuple[dict[str, Any], str, str | None]] = [
    (spec("moonshotai/Kimi-K2.6"), "/d/drafter", "Kimi-K2.6"),
    (spec("/mnt/models/Kimi-K2.6/"), "/d/drafter", "Kimi-K2.6"),
    (spec(CACHE.format("moonshotai--Kimi-K2.6")), "/d/x", "Kimi-K2.6"),
    (spec("C:\\models\\Kimi-K2.6"), "/d/drafter", "Kimi-K2.6"),
    (spec(None), "/d/drafter", None),
    (spec(""), "/d/drafter", None),
    (spec("."), "/d/Kimi-K2.5-DFlash", "Kimi-K2.5"),
    (spec(7), "/d/drafter", None),
    ({VERIFIER: "text"}, "/d/drafter", None),
    ({VERIFIER: {"verifier": ["a"]}}, "/d/drafter", None),
    ({"base_model": "org/Kimi-K2.5"}, "/d/Kimi-K2.6-DFlash", "Kimi-K2.5"),
    ({"verifier": {"name_or_path": "org/A-1"}}, "/d/drafter", "A-1"),
    ({"verifier": "org/A-1"}, "/d/drafter", "A-1"),
    ({"dflash_config": {"base_model": "org/A-1"}}, "/d/drafter", "A-1"),
    ({"dflash_config": None, "target": 3.5}, "/d/drafter", None),
    ({"_name_or_path": "z-lab/Kimi-K2.5-DFlash"}, "/d/drafter", "Kimi-K2.5"),
    ({"_name_or_path": "moonshotai/Kimi-K2.5"}, "/d/drafter", None),  # its own, without a mark
    ({}, "/d/Qwen3-8B-DFlash-b16", "Qwen3-8B"),
    ({}, "/d/Kimi-K2.7-coder-DFLASH-preview", "Kimi-K2.7-coder"),
    ({}, "/d/Kimi-K2.6-speculator.dflash", "Kimi-K2.6"),
    ({}, CACHE.format("z-lab--Kimi-K2.5-DFlash"), "Kimi-K2.5"),
    ({}, "/d/dflash", None),
    ({}, "/d/my-dflash", None),  # tells no version
    ({}, "/d/my-FP8-dflash", None),
    (spec("/data/target"), "/d/drafter", None),
    (spec("/data/target"), "/d/Kimi-K2.6-DFlash", "Kimi-K2.6"),
    (spec("moonshotai/Kimi-K2.6@main"), "/d/drafter", "Kimi-K2.6"),
    ({}, "/d/drafter", None),
    ({}, "/", None),
]


@pytest.mark.parametrize(("config", "folder", "name"), NAMES)
def test_what_a_drafter_names(config: dict[str, Any], folder: str, name: str | None) -> None:
    assert drafted_target(config, PurePath(folder)) == name


K25 = {"base_model": "moonshotai/Kimi-K2.5"}
K26 = {"base_model": "moonshotai/Kimi-K2.6"}
PAIRS: list[tuple[dict[str, Any], dict[str, Any], str, bool]] = [
    (K25, {"_name_or_path": "moonshotai/Kimi-K2.6"}, "/m/target", True),
    (K26, {"_name_or_path": "moonshotai/Kimi-K2.6"}, "/m/target", False),
    (K26, {"_name_or_path": "someone/kimi_k26"}, "/m/target", False),
    (K26, {"_name_or_path": "nvidia/Kimi-K2.6-NVFP4"}, "/m/target", False),
    (K25, {"_name_or_path": "nvidia/Kimi-K2.6-NVFP4"}, "/m/target", True),
    (K25, {"text_config": {"_name_or_path": "moonshotai/Kimi-K2.6"}}, "/m/target", True),
    (K25, {}, CACHE.format("moonshotai--Kimi-K2.6"), True),
    (K26, {}, CACHE.format("moonshotai--Kimi-K2.6"), False),
    (K25, {}, "/m/Kimi-K2.6", True),
    (K25, {}, "/m/Kimi-K2.5", False),
    (K25, {}, "/m/target", False),  # a folder may be called anything
    (K25, {}, "/m/model-2", False),
    ({"base_model": "org/7"}, {}, "/m/8", False),
    ({}, {"_name_or_path": "moonshotai/Kimi-K2.6"}, "/m/target", False),
    (K25, {"_name_or_path": ["odd"], "text_config": 5}, "/m/target", False),
    (K25, {"_name_or_path": ""}, "/m/target", False),
    (K26, {"_name_or_path": "/ckpt/hf"}, "/m/target", False),
    (K26, {"_name_or_path": "/ckpt/iter_100"}, "/m/target", False),
    (K26, {"_name_or_path": "/ckpt/Kimi-K2.5"}, CACHE.format("moonshotai--Kimi-K2.6"), False),
    (K25, {"_name_or_path": "/ckpt/iter_100"}, CACHE.format("moonshotai--Kimi-K2.6"), True),
    (K25, {"_name_or_path": "/ckpt/iter_100"}, "/m/Kimi-K2.6", True),
    (K26, {}, "/m/kimi", False),
    (K26, {}, "/m/Kimi-latest", False),
    (K26, {}, "/m/Kimi-K2.6-FP8-dynamic", False),
    (K25, {}, "/m/Kimi-K2.6-FP8-dynamic", True),
    (K26, {}, "/m/Kimi-K2.6-int4-g32", False),
    (K26, {"_name_or_path": "moonshotai/Kimi-K2.6@main"}, "/m/target", False),
    ({"base_model": "K2.6"}, {}, CACHE.format("moonshotai--Kimi-K2.6"), False),
    (K26, {}, "/m/k26", False),
    (spec("/data/target"), {}, "/m/Kimi-K2.6", False),
]


@pytest.mark.parametrize(("drafter", "target", "folder", "warned"), PAIRS)
def test_who_is_warned(
    drafter: dict[str, Any], target: dict[str, Any], folder: str, warned: bool
) -> None:
    text = revision_warning(drafter, PurePath("/d/drafter"), target, [PurePath(folder)])
    assert (text is not None) == warned
    if text is not None:
        assert "Kimi-K2.5" in text and "Kimi-K2.6" in text and "\n" not in text
        assert "K2.5's on K2.6 accepts 16% at 8 tokens, a net loss" in text


def test_the_folder_behind_a_link_counts_too() -> None:
    for given, warned in (("/m/latest", True), ("/m/Kimi-K2.5", False)):
        paths = [PurePath(given), PurePath("/m/Kimi-K2.6")]
        assert (revision_warning(K25, PurePath("/d/x"), {}, paths) is not None) == warned
