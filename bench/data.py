"""Labelled images for the benchmarks, read from their published formats; nothing is downloaded."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Images:
    """Labelled images.

    Attributes:
        pixels: (N, C, H, W), fp32 in [-1, 1].
        labels: (N,), int64 in [0, classes).
        classes: number of classes.
    """

    pixels: Tensor
    labels: Tensor
    classes: int

    def __getitem__(self, index: slice | Tensor) -> Images:
        return Images(self.pixels[index], self.labels[index], self.classes)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def draw(self, batch: int, generator: torch.Generator) -> Images:
        """`batch` of them, with replacement."""
        return self[torch.randint(len(self), (batch,), generator=generator)]


CLASSES = 10
"""All three data sets have ten."""


def _images(pixels: np.ndarray, labels: np.ndarray, highest: float, where: object) -> Images:
    if len(pixels) != len(labels):
        raise ValueError(
            f"{where}: {len(pixels)} images but {len(labels)} labels. The copy is damaged: fetch it again."
        )
    if len(labels) and labels.max() >= CLASSES:
        raise ValueError(f"{where}: a label is {labels.max()}, but the classes are 0 .. {CLASSES - 1}.")
    scaled = pixels.astype(np.float32) * (2 / highest) - 1
    return Images(torch.from_numpy(scaled), torch.from_numpy(labels.astype(np.int64)), CLASSES)


def load_digits() -> Images:
    """scikit-learn's digits: 1 797 images of 1x8x8, inside the package.

    Raises:
        FileNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise FileNotFoundError(
            "the digits are part of scikit-learn, which is not installed: python -m pip install scikit-learn"
        ) from error
    digits = load()
    return _images(digits.images[:, None], digits.target, 16, "scikit-learn's digits")


# idx: Fashion-MNIST

IDX_UBYTE = 0x08
"""The element type of the published files; the third byte of an idx file (http://yann.lecun.com/exdb/mnist)."""


def read_idx(path: Path) -> np.ndarray:
    """An idx file of unsigned bytes, gzipped if its name ends in .gz.

    Two zero bytes, the element type, the number of dimensions, each dimension as a big-endian int32, then the
    elements.

    Raises:
        ValueError: not such a file, or its length is not what its head says.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}). The copy is damaged: fetch it again.") from error
    if len(content) < 4 or content[:3] != bytes([0, 0, IDX_UBYTE]):
        raise ValueError(f"{path} is not an idx file of bytes: it begins with {content[:4].hex()}, not 000008.")
    start = 4 + 4 * content[3]
    shape = tuple(np.frombuffer(content[4:start], ">i4").tolist())
    if len(content) - start != int(np.prod(shape)):
        raise ValueError(
            f"{path} says it holds {shape}, but {len(content) - start} bytes follow. "
            "The copy is damaged: fetch it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


FASHION_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")


def load_fashion_mnist(folder: Path) -> Images:
    """Fashion-MNIST's training set, 60 000 images of 1x28x28, from its idx files (with or without .gz).

    Raises:
        FileNotFoundError: no such files.
        ValueError: damaged files.
    """
    images, labels = (
        _find(
            folder,
            ("", "FashionMNIST/raw", "fashion-mnist"),
            (f"{name}.gz", name),
            "Fashion-MNIST",
            FASHION_URL,
        )
        for name in FASHION_FILES
    )
    pixels = read_idx(images)
    if pixels.ndim != 3:
        raise ValueError(f"{images} holds an array of shape {pixels.shape}, not images (N, H, W).")
    return _images(pixels[:, None], read_idx(labels), 255, folder)


FASHION_URL = "https://github.com/zalandoresearch/fashion-mnist"

# CIFAR-10

CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR_SHAPE = (3, 32, 32)
CIFAR_PYTHON = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR_BINARY = tuple(f"{name}.bin" for name in CIFAR_PYTHON)


class _ArraysOnly(pickle.Unpickler):
    """Unpickles arrays and plain containers: a pickle may otherwise run any code."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "encode"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            # The published files name a module that numpy 2 moved.
            moved = module.startswith("numpy.core.") and np.lib.NumpyVersion(np.__version__) >= "2.0.0"
            return super().find_class(module.replace("numpy.core.", "numpy._core.") if moved else module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not part of an array")


def read_cifar_python(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """One batch of the "python version": pixels (N, 3, 32, 32) and labels (N,), both unsigned bytes.

    Raises:
        ValueError: not such a file.
    """
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        pixels = np.asarray(batch[b"data"], np.uint8).reshape(-1, *CIFAR_SHAPE)
        return pixels, np.asarray(batch[b"labels"], np.uint8)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a batch of CIFAR-10's python version: {error!r}.") from error


def read_cifar_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """One batch of the "binary version": pixels (N, 3, 32, 32) and labels (N,), both unsigned bytes.

    Each record is one label byte and 3 072 pixel bytes: the red plane, the green, the blue, row by row.

    Raises:
        ValueError: not a whole number of records.
    """
    record = 1 + int(np.prod(CIFAR_SHAPE))
    content = np.frombuffer(path.read_bytes(), np.uint8)
    if not len(content) or len(content) % record:
        raise ValueError(
            f"{path} has {len(content)} bytes, not a whole number of records of {record}: "
            "it is no batch of CIFAR-10's binary version, or damaged."
        )
    records = content.reshape(-1, record)
    return records[:, 1:].reshape(-1, *CIFAR_SHAPE), records[:, 0]


def load_cifar10(folder: Path) -> Images:
    """CIFAR-10's training set, 50 000 images of 3x32x32, from its python or its binary batches.

    Raises:
        FileNotFoundError: no such files.
        ValueError: damaged files.
    """
    places = ("", "cifar-10-batches-py", "cifar-10-batches-bin")
    parts = []
    for names in zip(CIFAR_PYTHON, CIFAR_BINARY, strict=True):
        path = _find(folder, places, names, "CIFAR-10", CIFAR_URL)
        parts.append(read_cifar_binary(path) if path.suffix == ".bin" else read_cifar_python(path))
    pixels, labels = (np.concatenate(x) for x in zip(*parts, strict=True))
    return _images(pixels, labels, 255, folder)


def _find(folder: Path, places: Sequence[str], names: Sequence[str], title: str, url: str) -> Path:
    """The first of `names` in one of the `places` under `folder`."""
    for place in places:
        for name in names:
            if (folder / place / name).is_file():
                return folder / place / name
    state = "which does not exist" if not folder.is_dir() else f"in it and in {', '.join(p for p in places if p)}"
    raise FileNotFoundError(
        f"{title} needs the file {' or '.join(names)}; looked in {folder.resolve()}, {state}. "
        f"Nothing is downloaded: get your own copy from {url}, unpack it, and pass its folder as --data-dir."
    )


READERS: dict[str, Callable[[Path], Images]] = {
    "digits": lambda folder: load_digits(),
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
}


def load(name: str, folder: Path) -> Images:
    """A data set by name; `folder` holds the user's own copy (the digits need none).

    Raises:
        FileNotFoundError: what was looked for, where, and what to do.
        ValueError: an unknown name, or damaged files.
    """
    if name not in READERS:
        raise ValueError(f"there is no data set {name!r}: choose one of {', '.join(READERS)}.")
    return READERS[name](folder)
