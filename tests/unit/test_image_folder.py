"""Images in folders have the classes and the order of torchvision's ImageFolder."""

from __future__ import annotations

import os
import pickle
import random
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from paceline.data import ImageFolder
from paceline.errors import DatasetError, UsageError

ENDS = (".png", ".PNG", ".jpg", ".txt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = random.Random(0)
    for name in ("b", "a", "a b", "B", "a-1", "z/y"):
        for n in range(20):
            below = tmp_path / "images" / name / rng.choice(["", "s", "s/t", "s-1", "S", "10", "9"])
            below.mkdir(parents=True, exist_ok=True)
            path = below / f"{rng.choice('abXY019_-')}{n}{rng.choice(ENDS)}"
            if path.suffix == ".txt":
                path.write_text("no image")
            else:
                Image.new("RGB", (3, 2), (n, 2 * n, len(name))).save(path)
    (tmp_path / "images" / "notes.txt").touch()
    return tmp_path / "images"


def by_torchvision(folder: Path) -> list[tuple[str, int]]:
    """As `find_classes` and `make_dataset` of torchvision.datasets.folder (0.28) do it."""
    classes, rows = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()), []
    for number, name in enumerate(classes):
        for root, _, names in sorted(os.walk(folder / name, followlinks=True)):
            images = [file for file in sorted(names) if file.lower().endswith((".png", ".jpg"))]
            rows += [(os.path.join(root, file), number) for file in images]
    return rows


def test_images_are_those_of_torchvision(folder: Path) -> None:
    rows, expected = ImageFolder(folder), by_torchvision(folder)
    assert len(rows) == len(expected) > 80
    assert rows.classes == ["B", "a", "a b", "a-1", "b", "z"]
    assert rows.class_to_idx["a-1"] == 3
    assert rows.targets == [number for _, number in expected]
    for (image, number), (path, target) in zip(rows.__getitems__(range(len(rows))), expected, strict=True):
        with Image.open(path) as original:
            assert image.tobytes() == original.convert("RGB").tobytes()
        assert number == target
    assert pickle.loads(pickle.dumps(rows))[-1][0].tobytes() == rows[len(rows) - 1][0].tobytes()
    with pytest.raises(IndexError, match=f"row {len(rows)} of {len(rows)}"):
        rows[len(rows)]


def test_images_become_tensors_of_a_transform(folder: Path) -> None:
    plain, rows = ImageFolder(folder, images="torchrgb8"), ImageFolder(folder, images="rgb8", transform=torch.tensor)
    images, classes = default_collate(plain.__getitems__([5, 0]))
    assert (images.shape, images.dtype, classes.tolist()) == ((2, 3, 2, 3), torch.uint8, plain.targets[5::-5])
    assert rows[5][0].permute(2, 0, 1).equal(images[0])


def test_images_of_another_store_are_read_alike(folder: Path) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    store.put(str(folder), "/pictures", recursive=True)
    try:
        there, local = ImageFolder("memory://pictures", images="rgb8"), ImageFolder(folder, images="rgb8")
        assert (there.targets, there.classes) == (local.targets, local.classes)
        wanted = [3, 17, 3]
        pairs = zip(there.__getitems__(wanted), local.__getitems__(wanted), strict=True)
        assert all((one[0] == other[0]).all() and one[1] == other[1] for one, other in pairs)
    finally:
        store.rm("/pictures", recursive=True)


def test_names_with_brackets_are_no_patterns(tmp_path: Path) -> None:
    import fsspec

    names = ("cat[1].png", "cat1.png", "what?.png", "star*.png")
    store = fsspec.filesystem("memory")
    (tmp_path / "images" / "a").mkdir(parents=True)
    for number, name in enumerate(names):
        Image.new("L", (1, 1), number).save(tmp_path / "images" / "a" / name)
    for path in (tmp_path / "images" / "a").iterdir():
        store.pipe_file(f"/brackets/a/{path.name}", path.read_bytes())
    try:
        order = [names.index(name) for name in sorted(names)]
        for url in (tmp_path / "images", "memory://brackets"):
            rows = ImageFolder(url, images="l8")
            assert [int(image[0, 0]) for image, _ in rows.__getitems__(range(4))] == order
            assert [int(image[0, 0]) for image, _ in rows.__getitems__([2, 0, 2])] == [order[2], order[0], order[2]]
    finally:
        store.rm("/brackets", recursive=True)


def test_empty_folder_of_a_class_is_refused_everywhere(folder: Path) -> None:
    """Left out, it would change the numbers of the classes after it."""
    import fsspec

    (folder / "a-2").mkdir()
    store = fsspec.filesystem("memory")
    store.put(str(folder), "/pictures", recursive=True)
    store.makedirs("/pictures/a-2", exist_ok=True)
    ends = ".jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp"
    try:
        for url in (str(folder), "memory://pictures", f"file://{folder}"):
            with pytest.raises(DatasetError) as raised:
                ImageFolder(url)
            what = f"the class a-2 of {url} has no images"
            assert str(raised.value) == f"{what}; remove its folder, or add files that end with {ends}"
    finally:
        store.rm("/pictures", recursive=True)


def test_folders_that_cannot_be_used_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "c").mkdir()
    (folder / "c" / "x.txt").touch()
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "1.png").touch()
    cure, ends = "pass a folder with one folder of images for each class", ".bmp, .pgm, .tif, .tiff, .webp"
    remove = f"remove its folder, or add files that end with .jpg, .jpeg, .png, .ppm, {ends}"
    for path, text in (
        (folder, f"the class c of {folder} has no images; {remove}"),
        (tmp_path / "flat", f"{tmp_path}/flat has no folders; {cure}"),
        (tmp_path / "none", f"{tmp_path}/none does not exist; {cure}"),
        (tmp_path / "flat" / "1.png", f"{tmp_path}/flat/1.png has no folders; {cure}"),
        (f"file://{tmp_path}/flat/1.png", f"file://{tmp_path}/flat/1.png has no folders; {cure}"),
    ):
        with pytest.raises(DatasetError) as raised:
            ImageFolder(path)
        assert str(raised.value) == text
    with pytest.raises(UsageError) as listed:
        ImageFolder([folder])  # type: ignore[arg-type]
    assert str(listed.value) == f"url= needs a path or a URL, got a list; {cure}"
    (folder / "c" / "x.png").write_bytes(b"no image")
    rows = ImageFolder(folder)
    with pytest.raises(DatasetError, match=rf"^{folder}/c/x\.png cannot be decoded \(cannot identify image file"):
        rows[rows.targets.index(5)]
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError) as refused:
        rows[0]
    assert str(refused.value) == "images need pillow; pip install 'paceline[images]'"
