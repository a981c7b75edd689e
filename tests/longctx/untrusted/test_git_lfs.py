"""What is a Git LFS pointer, judged by a file's first bytes."""

import pytest

from longctx.untrusted.git_lfs import POINTER_LINE, is_pointer

_POINTER = POINTER_LINE + b"\noid sha256:" + b"4d7a2146" * 8 + b"\nsize 123456\n"


@pytest.mark.parametrize(
    "head",
    [
        _POINTER,
        _POINTER[:64],
        _POINTER.replace(b"\n", b"\r\n"),
        POINTER_LINE + b"\next-0-case sha256:" + b"4d7a2146" * 8 + b"\n",
        POINTER_LINE,
    ],
    ids=["a whole pointer", "its first 64 bytes", "lines of Windows", "an extension", "the line alone"],
)
def test_a_pointer_is_known_by_its_first_line(head: bytes) -> None:
    assert is_pointer(head)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        POINTER_LINE[:-1],
        POINTER_LINE + b"0\n",
        POINTER_LINE + b" is how a pointer begins.\n",
        b"\n" + _POINTER,
        b"PAR1" + _POINTER,
        _POINTER.decode().encode("utf-16"),
    ],
    ids=["nothing", "a shorter line", "another version", "a sentence", "a later line", "Parquet", "UTF-16"],
)
def test_other_files_are_no_pointers(head: bytes) -> None:
    assert not is_pointer(head)
