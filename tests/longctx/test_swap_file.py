"""A rank's swap file: what was written comes back, and a disk that fails says so."""

from __future__ import annotations

import errno
import os
import resource

import pytest
import torch

from longctx import swap_file
from longctx.swap_file import ALIGNMENT, SwapFile


def move(futures) -> None:
    for future in futures:
        future.result()


def without_direct_io(monkeypatch) -> None:
    """What a file system does that has none."""
    real = os.open

    def refuse(path, flags: int, *args, **kwargs) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(swap_file.os, "open", refuse)


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_written_comes_back(tmp_path, monkeypatch, dtype, is_direct):
    """Odd lengths, addresses that are not aligned, several blocks, and a name that is written twice."""
    monkeypatch.setattr(swap_file, "BLOCK_BYTES", 2 * ALIGNMENT)
    if not is_direct:
        without_direct_io(monkeypatch)
    file = SwapFile(tmp_path)
    if not is_direct:
        assert not file.is_direct
    memory = torch.randn(50_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    cuts = {"a": memory[1:2], "b": memory[7:20_000], "c": memory[20_000:], "d": memory[:0]}
    for _ in range(2):
        for name, values in cuts.items():
            move(file.write(name, values))
        memory.mul_(-1)
    for name, values in cuts.items():
        out = torch.zeros(len(values) + 3, dtype=dtype)[3:]
        move(file.read(name, out))
        assert torch.equal(out, -values), name
    first = torch.empty(5, dtype=dtype)
    move(file.read("b", first))
    assert torch.equal(first, -cuts["b"][:5])


def test_nothing_has_a_name_and_nothing_is_left(tmp_path):
    file = SwapFile(tmp_path)
    move(file.write("x", torch.ones(1 << 20)))
    assert list(tmp_path.iterdir()) == []
    reserved = file.num_bytes
    assert reserved == 4 << 20
    fd = file._fd
    assert os.fstat(fd).st_blocks * 512 >= reserved
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_disk_that_is_full_says_so_before_anything_is_written(tmp_path, monkeypatch):
    """DeepSpeed's own handle counts the write as done, and reads back whatever the memory held."""
    file = SwapFile(tmp_path)
    kept = torch.arange(5000.0)
    move(file.write("kept", kept))

    def full(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(swap_file.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        file.write("more", torch.zeros(5000))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path)
    out = torch.empty(5000)
    move(file.read("kept", out))
    assert torch.equal(out, kept)


def test_so_does_one_that_takes_no_more(tmp_path):
    """A limit on the size of files is the one refusal that every machine can be brought to."""
    file = SwapFile(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        move(file.write("small", torch.ones(1000)))
        with pytest.raises(OSError, match="File too large"):
            file.write("large", torch.ones(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("action", ["read", "write"])
def test_a_transfer_that_fails_says_so(tmp_path, monkeypatch, action):
    file = SwapFile(tmp_path)
    values = torch.ones(5000)
    move(file.write("x", values))

    def broken(fd: int, buffers: list, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(swap_file.os, {"read": "preadv", "write": "pwritev"}[action], broken)
    with pytest.raises(OSError, match="Input/output error"):
        move(getattr(file, action)("x", values))


def test_a_file_that_ends_too_early_says_so(tmp_path):
    file = SwapFile(tmp_path)
    move(file.write("x", torch.ones(5000)))
    os.ftruncate(file._fd, 4096)
    with pytest.raises(OSError, match="ends too early"):
        move(file.read("x", torch.empty(5000)))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        SwapFile(tmp_path / "missing")
