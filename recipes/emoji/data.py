"""Build the captioned emoji set: Microsoft's Fluent 3D art, emojibase captions, one parquet file.

python -m recipes.emoji.data               # fetch with `npm pack`, build, write parquet and licences
python -m recipes.emoji.data --size 128    # the same rows at 128x128
python -m recipes.emoji.data --check       # rebuild and compare the hash of decoded content with the parquet
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from recipes.emoji.common import SIZES, parquet, state_folder
from shiva.checkpoint import write_atomically

ART, CAPTIONS, OFFICIAL = "@lobehub/fluent-emoji-3d@1.1.0", "emojibase-data@17.0.0", "fluentui-emoji-js@1.2.1"
STYLE = "fluent-3d"
HELD_OUT = 0.08
"""Share of labels held out as validation, in every group."""
CORE_DISTANCE = {
    "smileys-emotion": 0.15,
    "people-body": 0.195,
    "animals-nature": 0.14,
    "food-drink": 0.12,
    "travel-places": 0.19,
    "activities": 0.135,
    "objects": 0.18,
    "symbols": 0.145,
}
"""Core images of a group differ from each other by at least this RMS distance at 16x16 pixels (0 to 1 scale).
Food, animals and activities are what people try first, so they lose the fewest."""
DROPPED_GROUPS = {"component", "flags"}
NOT_CORE = re.compile(
    r"o’clock|-thirty|Japanese “|button$|keycap|skin tone|^(man|woman|men|women|boy|girl|family|couple|kiss)\b"
    r"|\b(man|woman|men|women)$|medium|^(waxing|waning|first quarter|last quarter|new moon)"
)
"""Labels whose drawings differ from a sibling's in small details only: clock faces, lettering, gender variants."""


def plain(code: str) -> str:
    """A code point sequence without variation selectors, the key on which the three packages agree."""
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")


def fetch(package: str, cache: Path) -> Path:
    """The package's tarball, from the cache folder or by `npm pack`."""
    name, version = package.rsplit("@", 1)
    tarball = cache / f"{name.lstrip('@').replace('/', '-')}-{version}.tgz"
    if not tarball.exists():
        if shutil.which("npm") is None:
            raise RuntimeError(f"npm is not installed and {tarball} is missing; install npm or copy the file there")
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", package], cwd=cache, check=True, capture_output=True)
    return tarball


def read_members(tarball: Path, wanted: Iterable[str] | None = None, folder: str = "") -> dict[str, bytes]:
    names = set(wanted or ())
    content: dict[str, bytes] = {}
    with tarfile.open(tarball) as archive:
        for member in archive:
            path = member.name.removeprefix("package/")
            if member.isfile() and (path in names or (folder and path.startswith(folder))):
                file = archive.extractfile(member)
                assert file is not None
                content[path] = file.read()
    return content


def render(webp: bytes, size: int) -> np.ndarray:
    """A transparent image of any size on white, (size, size, 3) uint8."""
    picture = Image.open(io.BytesIO(webp)).convert("RGBA")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    picture = Image.alpha_composite(white, picture).convert("RGB")
    return np.asarray(picture.resize((size, size), Image.Resampling.LANCZOS))


def join(cache: Path) -> list[dict[str, Any]]:
    """One row per emoji that is on Microsoft's list, has art and a caption; in emojibase's order.

    `pixels` holds the art as it comes, a webp file.
    """
    listed = json.loads(read_members(fetch(OFFICIAL, cache), ["emojiData.json"])["emojiData.json"])
    official = {plain(e["unicode"].replace(" ", "-")) for e in listed if "3D" in e["emojiStyles"]}
    art = {plain(Path(name).stem): data for name, data in read_members(fetch(ART, cache), folder="assets/").items()}
    captions = read_members(fetch(CAPTIONS, cache), ["en/data.json", "meta/groups.json"])
    names = json.loads(captions["meta/groups.json"])
    rows = []
    for entry in sorted(json.loads(captions["en/data.json"]), key=lambda e: e.get("order", 0)):
        code = plain(entry["hexcode"])
        group = names["groups"].get(str(entry.get("group")), "component")
        if group in DROPPED_GROUPS or code not in art or code not in official:
            continue
        rows.append(
            {
                "pixels": art[code],
                "label": entry["label"],
                "tags": list(entry.get("tags", [])),
                "group": group,
                "subgroup": names["subgroups"][str(entry["subgroup"])],
                "codepoint": code,
                "style": STYLE,
            }
        )
    return rows


def mark_core(rows: list[dict[str, Any]]) -> None:
    """Mark the labels the transformer learns: no near-duplicates by name, nor by picture.

    Of two similar pictures the one with the shorter name stays.
    """
    kept: dict[str, list[np.ndarray]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: len(row["label"].split())):
        small = Image.fromarray(render(row["pixels"], SIZES[0])).resize((16, 16), Image.Resampling.BOX)
        thumbnail = np.asarray(small, dtype=np.float32) / 255  # (16, 16, 3)
        distances = [float(np.sqrt(np.mean((thumbnail - other) ** 2))) for other in kept[row["group"]]]
        distinct = min(distances, default=1.0) >= CORE_DISTANCE[row["group"]]
        row["core"] = distinct and not NOT_CORE.search(row["label"])
        if row["core"]:
            kept[row["group"]].append(thumbnail)


def mark_split(rows: list[dict[str, Any]]) -> None:
    """Hold out a fixed share of each group's labels (of core and other labels alike), chosen by hash."""
    strata = defaultdict(list)
    for row in rows:
        strata[row["group"], row["core"]].append(row)
    for members in strata.values():
        members.sort(key=lambda row: hashlib.sha256(row["codepoint"].encode()).hexdigest())
        held_out = round(len(members) * HELD_OUT)
        for index, row in enumerate(members):
            row["split"] = "validation" if index < held_out else "train"


def content_hash(rows: Iterable[dict[str, Any]]) -> str:
    """SHA-256 over decoded pixels and all other columns; the parquet's own encoding does not matter."""
    digest = hashlib.sha256()
    for row in sorted(rows, key=lambda row: row["codepoint"]):
        digest.update(np.ascontiguousarray(row["pixels"]).tobytes())
        digest.update(json.dumps({k: v for k, v in row.items() if k != "pixels"}, sort_keys=True).encode())
    return digest.hexdigest()


def build(cache: Path, size: int) -> list[dict[str, Any]]:
    """The rows with `pixels` at one size; which are core or held out does not depend on it."""
    rows = join(cache)
    mark_core(rows)
    mark_split(rows)
    return [{**row, "pixels": render(row["pixels"], size)} for row in rows]


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    import datasets

    def webp(pixels: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "WEBP", lossless=True, quality=80, method=4)
        return buffer.getvalue()

    text = datasets.Value("string")
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "pixels"}
    columns["image"] = [{"bytes": webp(row["pixels"]), "path": f"{row['codepoint']}.webp"} for row in rows]
    features = {
        "image": datasets.Image(),
        "label": text,
        "tags": datasets.List(text),
        **dict.fromkeys(("group", "subgroup", "codepoint", "style", "split"), text),
        "core": datasets.Value("bool"),
    }
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    buffer = io.BytesIO()
    table.to_parquet(buffer)
    write_atomically(path, buffer.getvalue())


def read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    for row in rows:
        row["pixels"] = np.asarray(Image.open(io.BytesIO(row.pop("image")["bytes"])).convert("RGB"))
    return rows


def write_licences(cache: Path, folder: Path) -> None:
    microsoft = read_members(fetch(OFFICIAL, cache), ["LICENSE"])["LICENSE"]
    emojibase = read_members(fetch(CAPTIONS, cache), ["LICENSE"])["LICENSE"]
    write_atomically(folder / "LICENSE-fluentui-emoji.txt", microsoft)
    write_atomically(folder / "LICENSE-emojibase.txt", emojibase)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", help="folder of downloads and checkpoints")
    parser.add_argument("--size", type=int, default=64, choices=SIZES)
    parser.add_argument("--check", action="store_true", help="rebuild and compare instead of writing")
    options = parser.parse_args()
    cache = state_folder(options.state) / "npm"
    rows, path = build(cache, options.size), parquet(options.size)
    digest = content_hash(rows)
    if options.check:
        stored = content_hash(read_parquet(path))
        if stored != digest:
            raise SystemExit(f"{path.name} holds {stored}, the sources give {digest}; build it again")
        print(f"same content: {digest}")
        return
    write_parquet(rows, path)
    write_licences(cache, path.parent)
    counts = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        counts[row["group"]][0] += 1
        counts[row["group"]][1] += row["core"]
        counts[row["group"]][2] += row["core"] and row["split"] == "validation"
    for group, (total, core, held_out) in counts.items():
        print(f"{group:16} {total:5} labels, {core:4} core, {held_out:3} of them held out")
    print(f"{len(rows)} rows, {sum(row['core'] for row in rows)} core; content {digest}")


if __name__ == "__main__":
    main()
