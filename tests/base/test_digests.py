"""Digests: the same bytes, the same digest; one bit, another one."""

from __future__ import annotations

import hashlib

import pytest
import torch

from mrem_deploy.base import digests


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),  # not contiguous
        torch.tensor(0.1),
        torch.zeros(0),
        torch.tensor([1, 2], dtype=torch.int8),
        torch.tensor([True, False]),
        torch.tensor([1.5], dtype=torch.bfloat16),  # NumPy has no such type
        torch.tensor([2.0], requires_grad=True),
    ],
)
def test_the_bytes_of_a_tensor_are_hashed(tensor: torch.Tensor) -> None:
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    assert digests.of_tensor(tensor) == hashlib.sha256(bytes(values.tolist())).hexdigest()


def test_a_line_names_type_shape_and_content() -> None:
    kind, shape, content = digests.line_of(torch.ones(3, 1)).split()
    assert (kind, shape) == ("float32", "3x1")
    assert content == digests.of_tensor(torch.ones(3))
    assert digests.line_of(torch.tensor(1.0)).split()[1] == "-"


def test_every_difference_is_named() -> None:
    lines = digests.lines_of({name: torch.ones(2) for name in ("same", "gone", "changed", "reshaped")})
    now = {
        "same": torch.ones(2),
        "new": torch.ones(1),
        "changed": torch.zeros(2),
        "reshaped": torch.ones(2, 1, dtype=torch.float64),
    }
    assert digests.differences(now, lines) == [
        "the tensor gone is missing",
        "the tensor new is not one of those written",
        "the tensor changed has changed since it was written",
        "the tensor reshaped is float64 2x1; it was written as float32 2",
    ]


def test_a_sealed_file_notices_every_bit() -> None:
    before = b'"own": "'
    data = digests.seal(b'{"a": 1, "own": "' + digests.UNSEALED.encode() + b'"}', before)
    digest = data[len(b'{"a": 1, "own": "') :][:64].decode()
    assert digests.is_sealed(data, before, digest)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        found = bytes(changed)[len(b'{"a": 1, "own": "') :][:64].decode("latin-1")
        assert not digests.is_sealed(bytes(changed), before, found)


def test_a_file_without_room_for_its_digest_is_not_sealed() -> None:
    with pytest.raises(ValueError, match="one place"):
        digests.seal(b"{}", b'"own": "')


def test_metadata_cover_each_other_and_the_tensors() -> None:
    tensors = {"a": torch.ones(2)}
    metadata = digests.sealed_metadata({"notes": "{}", "identity": "abc"}, tensors)
    assert digests.metadata_differences(metadata) == digests.tensor_differences(metadata, tensors) == []
    for key in metadata:
        assert digests.metadata_differences(metadata | {key: metadata[key] + "!"})
        assert digests.metadata_differences({k: v for k, v in metadata.items() if k != key})
    assert digests.metadata_differences(metadata | {"more": ""})
    assert digests.tensor_differences(metadata, {"a": torch.zeros(2)})
    assert digests.metadata_differences({"notes": "{}"}) == []  # an earlier release wrote it
