"""Manifests of pools and engines from files, folders and standard input, judged as the API server would judge them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import yaml

from epochkv_operator.api import InvalidObject, parse_engine, parse_pool
from epochkv_operator.api.base import API_VERSION, GROUP

Json = dict[str, Any]
_SUFFIXES: Final = (".yaml", ".yml", ".json")
KINDS: Final = ("KVCachePool", "InferenceEngine")


class _Loader(yaml.SafeLoader):
    """Dates are text, as they are for kubectl."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class FilesError(Exception):
    """Files that cannot be planned; each text names the file, the object, the field and the fix."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Manifest:
    """One object as its file has it, with its namespace filled in."""

    obj: Json
    source: str
    """The file, and the number of the document where it has several."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, namespace, name."""
        return self.obj["kind"], self.obj["metadata"]["namespace"], self.obj["metadata"]["name"]


@dataclass(frozen=True)
class Found:
    """What the files hold."""

    manifests: tuple[Manifest, ...]
    skipped: tuple[str, ...]
    """Objects of other kinds, named with their files."""


def read(paths: Sequence[str], stdin: TextIO, namespace: str | None, default_namespace: str) -> Found:
    """Every pool and engine of the files.

    Args:
        paths: files, folders (their `.yaml`, `.yml` and `.json` files, not those of folders in them), `-` for `stdin`.
        namespace: what every object must be in; None: objects without one are in `default_namespace`.

    Raises:
        FilesError: what cannot be read or would be refused; all problems at once.
    """
    manifests: dict[tuple[str, str, str], Manifest] = {}
    skipped: list[str] = []
    problems: list[str] = []
    for source, document in _documents(paths, stdin, problems):
        name = _named(document)
        if document.get("kind") not in KINDS or not str(document.get("apiVersion", "")).startswith(f"{GROUP}/"):
            skipped.append(f"{source}: {name}")
            continue
        try:
            manifest = _manifest(document, source, namespace, default_namespace)
        except FilesError as error:
            problems += error.problems
            continue
        if (other := manifests.get(manifest.key)) is not None:
            problems.append(f"{source}: {name} is also in {other.source}: keep one")
        manifests[manifest.key] = manifest
    if problems:
        raise FilesError(*problems)
    return Found(tuple(manifests.values()), tuple(skipped))


def _named(document: Json) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{document.get('kind') or 'an object without a kind'} {name or 'without a name'}"


def _manifest(document: Json, source: str, namespace: str | None, default_namespace: str) -> Manifest:
    name = _named(document)
    if document["apiVersion"] != API_VERSION:
        raise FilesError(f"{source}: {name}: apiVersion is {document['apiVersion']}: this version of epochkv has {API_VERSION}")
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise FilesError(f"{source}: {document['kind']}: metadata.name: it is required")
    own = metadata.get("namespace")
    if namespace is not None and own not in (None, namespace):
        raise FilesError(f"{source}: {name}: metadata.namespace is {own}, and --namespace is {namespace}: leave one out")
    metadata = {**metadata, "namespace": own or namespace or default_namespace}
    metadata.pop("managedFields", None)
    obj = {**document, "metadata": metadata}
    obj.pop("status", None)
    try:
        (parse_pool if obj["kind"] == "KVCachePool" else parse_engine)(obj)
    except InvalidObject as error:
        raise FilesError(f"{source}: {error}") from error
    return Manifest(obj, source)


def _documents(paths: Sequence[str], stdin: TextIO, problems: list[str]) -> Iterator[tuple[str, Json]]:
    for path in _files(paths, problems):
        try:
            text = stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
            documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{path}: {error.strerror if isinstance(error, OSError) else error}")
            continue
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f", line {mark.line + 1}" if mark is not None else ""
            problems.append(f"{path}{where}: not YAML: {getattr(error, 'problem', None) or error}")
            continue
        shown = "standard input" if path == "-" else path
        for number, document in enumerate(documents, 1):
            source = f"{shown}, document {number}" if len(documents) > 1 else shown
            if not isinstance(document, dict):
                problems.append(f"{source}: not an object with apiVersion, kind and metadata")
            elif document.get("kind") == "List" and isinstance(document.get("items"), list):
                yield from ((source, item) for item in document["items"] if isinstance(item, dict))
            else:
                yield source, document


def _files(paths: Sequence[str], problems: list[str]) -> Iterator[str]:
    for path in paths:
        if path == "-" or not Path(path).is_dir():
            yield path
            continue
        found = sorted(str(file) for file in Path(path).iterdir() if file.suffix in _SUFFIXES and file.is_file())
        if not found:
            problems.append(f"{path}: the folder has no {', '.join(_SUFFIXES)} files")
        yield from found
