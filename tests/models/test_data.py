"""The dataset readers, with tiny files written in the published formats."""

import gzip
import pickle
import struct

import numpy as np
import pytest
import torch

from bench.data import load, read_cifar_binary, read_cifar_python, read_idx


def idx(array, head=b"\0\0\x08"):
    return head + bytes([array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def random_bytes(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def write_fashion(folder, n=4, zipped=True, labels=None):
    images = random_bytes(n, 28, 28)
    labels = np.arange(n, dtype=np.uint8) if labels is None else labels
    for name, array in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    return images


def python2_pickle(pixels, labels):
    """The published files were written by Python 2, whose strings Python 3 cannot write: opcode by opcode."""

    def text(s):
        return b"U" + bytes([len(s)]) + s

    def number(n):
        return b"J" + struct.pack("<i", n)

    raw = pixels.tobytes()
    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t" + text(b"b") + b"tR"
    array += b"(" + number(1) + b"(" + b"".join(map(number, pixels.shape)) + b"t" + dtype
    array += b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    return b"".join(
        [
            b"\x80\x02}(",
            text(b"batch_label") + text(b"training batch 1 of 5"),
            text(b"labels") + b"](" + b"".join(map(number, labels.tolist())) + b"e",
            text(b"data") + array,
            b"u.",
        ]
    )


def write_cifar(folder, kind, n=2):
    pixels, labels = random_bytes(5, n, 3072), np.arange(5 * n, dtype=np.uint8).reshape(5, n)
    for i in range(5):
        if kind == "binary":
            records = np.concatenate([labels[i][:, None], pixels[i]], 1)
            (folder / f"data_batch_{i + 1}.bin").write_bytes(records.tobytes())
        else:
            (folder / f"data_batch_{i + 1}").write_bytes(python2_pickle(pixels[i], labels[i]))
    return pixels.reshape(-1, 3, 32, 32), labels.reshape(-1)


def check(data, pixels, labels):
    np.testing.assert_allclose(data.pixels.numpy(), pixels / 127.5 - 1, atol=1e-6)
    assert data.pixels.dtype == torch.float32
    assert data.labels.dtype == torch.int64
    assert data.labels.tolist() == list(labels)
    assert data.classes == 10


def test_digits(tmp_path):
    data = load("digits", tmp_path)
    assert data.pixels.shape == (1797, 1, 8, 8)
    assert data.pixels.min() == -1
    assert data.pixels.max() == 1
    assert data.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert data[:5].pixels.shape == (5, 1, 8, 8)
    assert data[:5].classes == 10


@pytest.mark.parametrize("place", [".", "FashionMNIST/raw", "fashion-mnist"])
@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist(tmp_path, place, zipped):
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    images = write_fashion(folder, zipped=zipped)
    check(load("fashion-mnist", tmp_path), images[:, None], range(4))


@pytest.mark.parametrize("kind", ["python", "binary"])
@pytest.mark.parametrize("inside", [True, False])
def test_cifar10(tmp_path, kind, inside):
    folder = (
        tmp_path / {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}[kind] if inside else tmp_path
    )
    folder.mkdir(exist_ok=True)
    pixels, labels = write_cifar(folder, kind)
    check(load("cifar10", tmp_path), pixels, labels)


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
def test_missing_files_are_named(tmp_path, name):
    wanted = {"fashion-mnist": "train-images-idx3-ubyte", "cifar10": "data_batch_1"}[name]
    with pytest.raises(FileNotFoundError, match=wanted) as error:
        load(name, tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "--data-dir" in str(error.value)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(name, tmp_path / "nowhere")


def test_a_missing_part_is_named(tmp_path):
    write_cifar(tmp_path, "python")
    (tmp_path / "data_batch_4").unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_4"):
        load("cifar10", tmp_path)


def test_unknown_name(tmp_path):
    with pytest.raises(ValueError, match="choose one of digits"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file"),
        (idx(random_bytes(2, 3), head=b"\0\0\x0d"), "not 000008"),
        (idx(random_bytes(2, 3))[:-1], "5 bytes follow"),
        (idx(random_bytes(2, 3)) + b"x", "7 bytes follow"),
    ],
)
def test_damaged_idx(tmp_path, content, message):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(path)


def test_damaged_gzip(tmp_path):
    path = tmp_path / "x.gz"
    for content in (b"no gzip", gzip.compress(idx(random_bytes(9, 9)))[:-20]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be unpacked"):
            read_idx(path)


def test_labels_that_do_not_fit(tmp_path):
    write_fashion(tmp_path, labels=np.arange(3, dtype=np.uint8))
    with pytest.raises(ValueError, match="4 images but 3 labels"):
        load("fashion-mnist", tmp_path)
    write_fashion(tmp_path, labels=np.array([0, 1, 2, 10], np.uint8))
    with pytest.raises(ValueError, match="a label is 10"):
        load("fashion-mnist", tmp_path)


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps({}), pickle.dumps({b"data": Evil()})])
def test_damaged_cifar_python(tmp_path, content, capsys):
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a batch of CIFAR-10's python version"):
        read_cifar_python(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("size", [0, 3072, 3074])
def test_damaged_cifar_binary(tmp_path, size):
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(ValueError, match="whole number of records"):
        read_cifar_binary(path)
