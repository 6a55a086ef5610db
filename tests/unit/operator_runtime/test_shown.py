"""What is read of a list of metadata, as an API server of 1.34 answers it."""

from __future__ import annotations

import msgspec
import pytest

from epochkv_operator.kube.client import shown_page as page

POD = b'{"metadata":{"name":"a","namespace":"n","uid":"u-%d","resourceVersion":"%d","labels":{"x":"y"},"managedFields":[{"f":{}}]}}'


def test_a_page_is_read_for_uids_and_versions() -> None:
    text = b'{"kind":"PartialObjectMetadataList","metadata":{"resourceVersion":"77","continue":"t"},"items":[%s]}'
    assert page(text % b",".join((POD % (1, 7), POD % (2, 12)))) == ({"u-1": 7, "u-2": 12}, 77, "t")


def test_an_empty_list_has_no_items() -> None:
    text = b'{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"49694"},"items":null}\n'
    assert page(text) == ({}, 49694, "")


@pytest.mark.parametrize("text", [b"", b"<html>", b"[]", b'{"items":[]}', b'{"metadata":{},"items":[{"metadata":{}}]}'])
def test_anything_else_is_no_page(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        page(text)
