"""Every tree and walk computed by the published DDTree code (shared/data/ddtree_golden.npz)."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from shared_data import needs, shared_data

from kdtree_engine.kernels.tree_mask import tree_visibility
from kdtree_engine.tree import DraftTree, accept, build_tree

FILE = shared_data("ddtree_golden.npz")
pytestmark = needs(FILE)

Case = tuple[dict[str, Any], dict[str, Any]]


def load() -> list[Case]:
    if not FILE.is_file():
        return []
    data = np.load(FILE)
    cases = json.loads(str(data["meta"]))["cases"]
    names = [name.split("_", 1) for name in data.files if name != "meta"]
    arrays: list[dict[str, Any]] = [{} for _ in cases]
    for prefix, field in names:
        arrays[int(prefix[1:])][field] = data[f"{prefix}_{field}"]
    return list(zip(cases, arrays, strict=True))


CASES = load()


def top_tree(meta: dict[str, Any], arrays: dict[str, Any]) -> DraftTree:
    return build_tree(
        torch.from_numpy(arrays["top_logprobs"]),
        torch.from_numpy(arrays["top_tokens"]),
        meta["budget"],
    )


def same_shape(tree: DraftTree, arrays: dict[str, Any]) -> bool:
    return (
        tree.tokens[1:].tolist() == arrays["tokens"].tolist()
        and tree.depths[1:].tolist() == arrays["depths"].tolist()
        and tree.parents.tolist() == arrays["parents"].tolist()
    )


def test_the_file_is_whole() -> None:
    assert len(CASES) == 69


@pytest.mark.parametrize(("meta", "arrays"), CASES)
def test_from_candidates(meta: dict[str, Any], arrays: dict[str, Any]) -> None:
    tree = top_tree(meta, arrays)
    assert tree.nodes == meta["nodes"]
    assert same_shape(tree, arrays)
    assert tree.scores[1:].numpy().tobytes() == arrays["scores"].tobytes()
    assert (int(tree.tokens[0]), float(tree.scores[0]), int(tree.depths[0])) == (-1, 0.0, 0)
    rows = meta["nodes"] + 1
    visible = np.unpackbits(arrays["visibility"], axis=1, count=rows).astype(bool)
    assert (tree_visibility(tree.parents[None])[0].numpy() == visible).all()


@pytest.mark.parametrize(("meta", "arrays"), CASES)
def test_from_logits(meta: dict[str, Any], arrays: dict[str, Any]) -> None:
    logits = torch.from_numpy(arrays["logits"])
    log_probs = logits - logits.logsumexp(-1, keepdim=True)
    top = log_probs.topk(min(meta["budget"], meta["V"]), dim=-1)
    tree = build_tree(top.values, top.indices, meta["budget"])
    if meta["token_ties"]:
        mine = tree.scores[1:].sort().values.numpy()
        assert np.abs(mine - np.sort(arrays["scores"])).max(initial=0.0) < 1e-4
    else:
        assert same_shape(tree, arrays)


@pytest.mark.parametrize(("meta", "arrays"), CASES)
def test_walks(meta: dict[str, Any], arrays: dict[str, Any]) -> None:
    tree = top_tree(meta, arrays)
    for walk in range(4):
        path = accept(tree, torch.from_numpy(arrays["posterior"][walk]))
        length = int(arrays["accepted_len"][walk])
        assert list(path.indices) == arrays["accepted"][walk, :length].tolist()
        assert path.next_token == int(arrays["next_token"][walk])
