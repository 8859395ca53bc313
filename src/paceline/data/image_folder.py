"""A dataset of images whose classes are the folders that they lie in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.data.byte_ranges import location_of, open_files
from paceline.data.decoding import Decoder
from paceline.data.row_groups import row_number
from paceline.errors import DatasetError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's
_MISSING = "pass a folder with one folder of images for each class"


class ImageFolder:
    """The images below a folder with one folder for each class, as torchvision's ImageFolder has them.

    Row i is a pair: an image, and the number of its class. Classes are numbered in the order of their names; rows are
    sorted by class, folder and name. `url` is a folder, or a URL that fsspec knows (``s3://...``), which gets
    `storage_options`; folders are listed when the dataset is opened. Files with other extensions than those of images
    are left out.

    `images` is what an image becomes, in the same words as in `WebDatasetRows`: "pil", "rgb8", "torchrgb8", ...
    `transform` is a function of that, for example of torchvision.

    `classes` are their names, `class_to_idx` is {name: number}, and `targets` are the class numbers of all rows, for
    example for `ClassBalancedOrder`. May be pickled and forked if `transform` may.

    Raises UsageError without pillow. Raises DatasetError if there are no classes, if the folder of a class has no
    images, and, when a row is read, if an image cannot be decoded.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        images: str = "pil",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        url = location_of(url, _MISSING)
        self._decoder, self._transform = Decoder(images), transform
        self._store = open_files(url, storage_options, _MISSING)
        self._root = self._store.root(url).rstrip("/")
        root = f"{self._root}/"
        listed = (path[len(root) :] for path in self._store.files_below(self._root) if path.startswith(root))
        # By class, folder and name: as the folders of all classes, one after another, are walked through.
        split = (
            (path.split("/")[0], path.rpartition("/")[0], path.rpartition("/")[2]) for path in listed if "/" in path
        )
        files = sorted(split)
        self.classes = sorted({name for name, _, _ in files} | self._store.folders_in(self._root))
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        rows = [
            (f"{folder}/{file}", self.class_to_idx[name])
            for name, folder, file in files
            if file.lower().endswith(EXTENSIONS)
        ]
        self._paths, self.targets = [path for path, _ in rows], [number for _, number in rows]
        if not self.classes:
            raise DatasetError(f"{url} has no folders", _MISSING)
        if empty := {*range(len(self.classes))} - {*self.targets}:
            what = f"the class {self.classes[min(empty)]} of {url} has no images"
            raise DatasetError(what, f"remove its folder, or add files that end with {', '.join(EXTENSIONS)}")

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[tuple[Any, int]]:
        """Several rows, in the order asked for. Raises IndexError."""
        numbers = [row_number(row, len(self)) for row in rows]
        paths = [f"{self._root}/{self._paths[number]}" for number in numbers]
        taken = list[tuple[Any, int]]()
        for number, path, data in zip(numbers, paths, self._store.contents(paths), strict=True):
            image = self._decoder(path, data, path)
            taken.append((image if self._transform is None else self._transform(image), self.targets[number]))
        return taken
