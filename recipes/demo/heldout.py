"""Write the held-out prompts that every acceptance figure uses, and unpack the corpus for reading.

    python recipes/demo/heldout.py --corpus .corpus --out benches/data/heldout.json \\
        --unpack TEXT
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import corpus

HERE = Path(__file__).parent


def snippets(text: str, size: int) -> list[str]:
    """Pieces of about `size` characters that start at a top-level statement, in file order."""
    found, start = [], 0
    for position in (i + 1 for i, c in enumerate(text) if c == "\n"):
        top = text.startswith(("def ", "class ", "@", "async def "), position)
        if top and position - start >= size:
            found.append(text[start : start + size].rsplit("\n", 1)[0] + "\n")
            start = position
    return found


def prompts(path: Path, manifest: Path, each: int, size: int) -> list[dict[str, str]]:
    """The same number of snippets from every held-out package, with their origin."""
    known = {p["name"]: p for p in json.loads(manifest.read_text())["packages"]}
    pools: dict[str, list[dict[str, str]]] = {}
    for row in corpus.rows(path):
        package = known[row["package"]]
        origin = {
            "package": row["package"], "version": package["version"],
            "licence": package["licence"], "path": row["path"],
        }
        pool = pools.setdefault(row["package"], [])
        pool += [{**origin, "text": piece} for piece in snippets(row["text"], size)]
    rng = random.Random(0)
    return [p for _, pool in sorted(pools.items()) for p in rng.sample(pool, min(each, len(pool)))]


def unpack(folder: Path, out: Path) -> int:
    """Every document as a file of its own: OUT/SPLIT/PACKAGE/PATH."""
    count = 0
    for part in sorted(folder.glob("*.jsonl.xz")):
        split = part.name.split(".")[0].split("-")[0]
        for row in corpus.rows(part):
            suffix = "" if row["path"].endswith(".py") else ".txt"
            target = out / split / row["package"] / (row["path"] + suffix)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(row["text"])
            count += 1
    return count


def main() -> None:
    """Write the prompts; unpack if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--manifest", type=Path, default=HERE / "manifest.json")
    parser.add_argument("--each", type=int, default=20, help="snippets per held-out package")
    parser.add_argument("--size", type=int, default=1500, help="characters of a snippet")
    parser.add_argument("--unpack", type=Path, help="folder for the whole corpus as plain files")
    args = parser.parse_args()
    rows = prompts(args.corpus / "heldout.jsonl.xz", args.manifest, args.each, args.size)
    note = "Source text of packages that no model in this repository was trained on."
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"note": note, "prompts": rows}, indent=1) + "\n")
    print(f"{len(rows)} prompts, {args.out.stat().st_size} bytes")
    if args.unpack:
        print(f"{unpack(args.corpus, args.unpack)} files under {args.unpack}")


if __name__ == "__main__":
    main()
