"""What the operator would do once manifests are applied, for `epochkv plan`.

The operator's own planner says it. As live objects it is given what the operator wants now, rendered here with the same settings: so
defaults, images and keys that only the running operator knows cancel out.
"""

import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from epochkv_fence.protocol.pool import listed
from epochkv_operator.api import InvalidObject, parse_engine, parse_pool
from epochkv_operator.api.base import API_VERSION, GROUP
from epochkv_operator.api.resources import ENGINES, POOLS, identity
from epochkv_operator.api.rules import violations
from epochkv_operator.kube.client import Json
from epochkv_operator.planning.context import Context, Observed
from epochkv_operator.planning.plan import Plan, plan_engine, plan_pool
from epochkv_operator.settings import Settings

Pools = dict[tuple[str, str], Json]
"""By namespace and name."""
KINDS: Final = (POOLS.kind, ENGINES.kind)
KUBECTL_SECONDS: Final = 60.0
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_UNKNOWN_UID: Final = "known-after-apply"


class CannotPlan(Exception):
    """Files that cannot be read or would be refused, or a cluster that cannot be asked; each text has the remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Subject(NamedTuple):
    """A pool or an engine. `before` None: it is new. `source`, its file, None: it is in none, and its pool changes."""

    before: Json | None
    after: Json
    source: str | None = None
    nulls: tuple[str, ...] = ()
    """Where the file has null in a `template`, and `kubectl apply` drops it."""


class Outcome(NamedTuple):
    """What would happen to one of them and to what the operator makes for it."""

    subject: Subject
    details: tuple[str, ...] = ()
    """The planner's steps, with why."""
    applied: tuple[Json, ...] = ()
    """The objects that the operator would apply, in the order of the steps."""
    pods: int = 0
    """Pods that would be replaced."""
    problem: str = ""
    """What stands in the way."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind, namespace, name = identity(self.subject.after)
        if self.subject.source is None:
            state = "is in no file; its pool changes"
        else:
            state = f"{'new' if self.subject.before is None else 'as it is applied'} ({self.subject.source})"
        problem = [f"! the operator would change nothing: {self.problem}"] if self.problem else []
        pods = (_pod_said(obj) if kind == ENGINES.kind else "" for obj in self.applied)
        steps = (f"{step}\n    {pod}" if pod else step for step, pod in itertools.zip_longest(self.details, pods, fillvalue=""))
        lines = [*(f"note: {note}" for note in self.notes), *problem, *steps]
        return "\n  ".join([f"{kind} {namespace}/{name}: {state}", *(lines or ["nothing to do"])]) + "\n"

    def as_json(self) -> Json:
        kind, namespace, name = identity(self.subject.after)
        facts = {"kind": kind, "namespace": namespace, "name": name, "file": self.subject.source, "new": self.subject.before is None}
        steps = {"steps": self.details, "apply": self.applied, "podsReplaced": self.pods}
        return {**facts, "problem": self.problem, "notes": self.notes, **steps}


def planned(
    paths: Sequence[str], live: bool, namespace: str | None, context: str | None, operator_namespace: str
) -> tuple[list[Outcome], list[str]]:
    """Outcomes, pools first, and what was skipped. Raises `CannotPlan`."""
    # Groups of pods need LeaderWorkerSet; whether the cluster has it, the operator says.
    rendered = Context(Settings(operator_namespace), served=frozenset({"LeaderWorkerSet"}))
    if live:
        return _live(paths, namespace, context, rendered)
    manifests, skipped = read(paths, namespace, "default")
    refused = [f"{source}: {obj['kind']} {'/'.join(identity(obj)[1:])}: {text}" for obj, source in manifests for text in violations(obj)]
    if refused:
        raise CannotPlan(*refused)
    subjects = [Subject(None, _with_uid(obj), source, tuple(_nulls(obj["spec"], "spec"))) for obj, source in manifests]
    return outcomes(subjects, {}, _pools(one.after for one in subjects), rendered), skipped


def outcomes(subjects: Sequence[Subject], before: Pools, after: Pools, context: Context) -> list[Outcome]:
    """For each subject, pools first; `before` and `after` are the pools as they are and as they would be."""
    ordered = sorted(subjects, key=lambda one: (one.after["kind"] != POOLS.kind, identity(one.after)))
    return [_outcome(one, before, after, context) for one in ordered]


def _outcome(subject: Subject, before: Pools, after: Pools, context: Context) -> Outcome:
    try:
        known = _plan(subject.before, before, (), context) if subject.before is not None else Plan()
        plan = _plan(subject.after, after, known.apply, context)
    except InvalidObject as error:
        return Outcome(subject, problem=str(error))
    if plan.problem is not None:
        return Outcome(subject, problem=f"{plan.problem.reason}: {plan.problem.message}")
    wanted = {identity(obj): obj for obj in known.apply}
    pods = {identity(obj): _replaced(wanted.get(identity(obj), {}), obj) for obj in plan.apply}
    steps = [
        detail + (_said(obj, pods[identity(obj)], identity(obj) not in wanted) if identity(obj) in pods else "")
        for detail, obj in zip(plan.details, (*plan.apply, *plan.delete), strict=True)
    ]
    return Outcome(subject, tuple(steps), plan.apply, sum(pods.values()), notes=tuple(_notes(subject, after)))


def _plan(obj: Json, pools: Pools, children: Sequence[Json], context: Context) -> Plan:
    if obj["kind"] == POOLS.kind:
        return plan_pool(parse_pool(obj), Observed(children), context)
    engine = parse_engine(obj)
    pool = pools.get(_pool_key(obj))
    return plan_engine(engine, parse_pool(pool) if pool is not None else None, Observed(children), context)


def _replaced(before: Json, after: Json) -> int:
    """Pods that a change of a workload replaces; a LeaderWorkerSet has groups of them."""
    old, new = before.get("spec", {}), after.get("spec", {})
    if all(old.get(name) == new.get(name) for name in ("template", "leaderWorkerTemplate")):
        return 0
    return min(_pods(old), _pods(new))


def _pods(spec: Json) -> int:
    return int(spec.get("replicas", 0) * (spec.get("leaderWorkerTemplate") or {}).get("size", 1))


def _said(obj: Json, replaced: int, new: bool) -> str:
    spec = obj.get("spec", {})
    if replaced:
        rolling: Json = next((spec[name] for name in ("strategy", "rolloutStrategy") if name in spec), {})
        details = rolling.get("rollingUpdate") or rolling.get("rollingUpdateConfiguration") or {}
        at_once = "all at once" if rolling.get("type") == "Recreate" else f"at most {details.get('maxUnavailable', 1)} at a time"
        return f"; replaces {replaced} pod{'s' if replaced > 1 else ''}, {at_once}"
    started = _pods(spec) if new else 0
    return f"; starts {started} pod{'s' if started > 1 else ''}" if started else ""


def _pod_said(workload: Json) -> str:
    """What a pod of an engine gets: what the fields were computed into. In a group of pods, the first one."""
    spec = workload.get("spec", {})
    template = spec.get("template") or (spec.get("leaderWorkerTemplate") or {}).get("leaderTemplate")
    if template is None:
        return ""
    container = next(container for container in template["spec"]["containers"] if container["name"] == "engine")
    resources = container.get("resources", {})
    memory = {**resources.get("requests", {}), **resources.get("limits", {})}.get("memory")
    arguments = " ".join("{...}" if argument.startswith("{") else shlex.quote(argument) for argument in container["args"])
    return f"each pod: {f'{memory} of memory, ' if memory else ''}vLLM with {arguments}"


def _notes(subject: Subject, pools: Pools) -> Iterator[str]:
    old, new = (subject.before or {}).get("spec", {}), subject.after["spec"]
    if subject.before is not None and new.get("resetEpoch", 0) > old.get("resetEpoch", 0):
        yield "all KV of the pool becomes unreachable, unless its target epoch is at or above resetEpoch already"
    if subject.nulls:
        text = "null, which `kubectl apply` drops without --server-side, and then removes nothing: write {$patch: delete} instead"
        yield f"{listed(subject.nulls)}: {text}"
    namespace, pool = _pool_key(subject.after)
    if pool and (namespace, pool) not in pools:
        yield f"KVCachePool {namespace}/{pool} was not found: shown as an engine without a pool"


def _nulls(value: Any, path: str) -> Iterator[str]:
    """Paths in the templates of a spec at which something is to be removed. Elsewhere null is as good as nothing."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _nulls(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            name = item.get("name", index) if isinstance(item, dict) else index
            yield from _nulls(item, f"{path}[{name}]")
    elif value is None and ".template.spec." in path:
        yield path


def _pool_key(obj: Json) -> tuple[str, str]:
    return obj["metadata"]["namespace"], (obj["spec"].get("poolRef") or {}).get("name", "")


def _pools(objects: Any) -> Pools:
    """Those that are not being deleted."""
    return {identity(obj)[1:]: obj for obj in objects if obj["kind"] == POOLS.kind and not obj["metadata"].get("deletionTimestamp")}


def _with_uid(obj: Json) -> Json:
    return {**obj, "metadata": {**obj["metadata"], "uid": _UNKNOWN_UID}}


# ---------------------------------------------------------------------------------------------------------------- cluster


def _live(paths: Sequence[str], namespace: str | None, context: str | None, rendered: Context) -> tuple[list[Outcome], list[str]]:
    """`kubectl` asks the cluster: it knows the kubeconfig, and what an apply of these files would do."""
    kubectl = ("kubectl", f"--request-timeout={KUBECTL_SECONDS:.0f}s", *(("--context", context) if context else ()))
    default = _run(kubectl, "config", "view", "--minify", "-o", "jsonpath={..namespace}") or "default"
    manifests, skipped = read(paths, namespace, default)
    names = ",".join(f"{kind.plural}.{GROUP}" for kind in (POOLS, ENGINES))
    live = [
        obj
        for place in sorted({obj["metadata"]["namespace"] for obj, _ in manifests})
        for obj in json.loads(_run(kubectl, "get", names, "-n", place, "-o", "json", "--show-managed-fields"))["items"]
    ]
    current = {identity(obj): obj for obj in live}
    subjects, problems = list[Subject](), list[str]()
    for obj, source in manifests:
        before = current.get(identity(obj))
        flags = "apply", "--dry-run=server", *_ownership(before), "-o", "json", "-f", "-"
        try:
            after = json.loads(_run(kubectl, *flags, manifest=obj, source=source))
        except CannotPlan as error:
            problems += error.problems
        else:
            kept = set(_nulls(after["spec"], "spec"))
            dropped = tuple(path for path in _nulls(obj["spec"], "spec") if path not in kept)
            subjects.append(Subject(before, after if before is not None else _with_uid(after), source, dropped))
    if problems:
        raise CannotPlan(*problems)
    pools = _pools(live) | _pools(one.after for one in subjects)
    changed = {identity(one.after)[1:] for one in subjects if one.before is None or one.before["spec"] != one.after["spec"]}
    known = {identity(one.after) for one in subjects}
    subjects += [Subject(one, one) for one in live if _pool_key(one) in changed and identity(one) not in known]
    return outcomes(subjects, _pools(live), pools, rendered), skipped


def _ownership(live: Json | None) -> tuple[str, ...]:
    """Flags with which `kubectl apply` removes the fields that the file has no more: the same as they were applied with."""
    metadata: Json = (live or {}).get("metadata", {})
    owners = {entry["manager"] for entry in metadata.get("managedFields") or () if entry.get("operation") == "Apply"}
    if live is None or not owners or _LAST_APPLIED in (metadata.get("annotations") or {}):
        return ()
    return "--server-side", "--force-conflicts", f"--field-manager={owners.pop() if len(owners) == 1 else 'kubectl'}"


def _run(kubectl: Sequence[str], *arguments: str, manifest: Json | None = None, source: str = "kubectl") -> str:
    """What it prints. Raises `CannotPlan` with what it complains of, after `source`."""
    text = json.dumps(manifest) if manifest is not None else None
    try:
        ran = subprocess.run([*kubectl, *arguments], input=text, capture_output=True, text=True, timeout=2 * KUBECTL_SECONDS, check=False)
    except FileNotFoundError as error:
        raise CannotPlan("--live needs kubectl on the PATH: install it, or leave out --live") from error
    except subprocess.TimeoutExpired as error:
        raise CannotPlan(f"{source}: no answer from the cluster within {error.timeout:.0f} s") from error
    if ran.returncode != 0:
        raise CannotPlan(f"{source}: {ran.stderr.strip()}: fix it, or leave out --live")
    return ran.stdout


# ------------------------------------------------------------------------------------------------------------------ files


class _Loader(yaml.SafeLoader):
    """Dates are text, and a key that is there twice is a mistake, as they are for kubectl."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if str(key.value) in seen - {"<<"}:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is there twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read(paths: Sequence[str], namespace: str | None, default_namespace: str) -> tuple[list[tuple[Json, str]], list[str]]:
    """Every pool and engine of files, folders (those files in them) and `-`, standard input, with its file; what was skipped.

    `namespace`: what every object must be in; None: objects without one are in `default_namespace`.

    Raises:
        CannotPlan: what cannot be read or does not fit the schema; all problems at once. Also when there is none.
    """
    manifests, skipped, problems = dict[tuple[str, str, str], tuple[Json, str]](), list[str](), list[str]()
    for source, document in _documents(paths, problems):
        given = document.get("metadata")
        metadata: Json = given if isinstance(given, dict) else {}
        name = f"{document.get('kind') or 'an object without a kind'} {metadata.get('name') or 'without a name'}"
        if document.get("kind") not in KINDS or not str(document.get("apiVersion", "")).startswith(f"{GROUP}/"):
            skipped.append(f"skipped, not a kind of EpochKV: {source}: {name}")
            continue
        if document["apiVersion"] != API_VERSION:
            problems.append(f"{source}: {name}: apiVersion is {document['apiVersion']}: this version of epochkv has {API_VERSION}")
            continue
        own = metadata.get("namespace")
        if namespace is not None and own not in (None, namespace):
            problems.append(f"{source}: {name}: metadata.namespace is {own}, and --namespace is {namespace}: leave one out")
            continue
        metadata = {key: value for key, value in metadata.items() if key != "managedFields"}
        obj = {**document, "metadata": {**metadata, "namespace": own or namespace or default_namespace}}
        obj.pop("status", None)
        try:
            parse_pool(obj) if obj["kind"] == POOLS.kind else parse_engine(obj)
        except InvalidObject as error:
            problems.append(f"{source}: {error}")
            continue
        if (other := manifests.get(identity(obj))) is not None:
            problems.append(f"{source}: {name} is also in {other[1]}: keep one")
        manifests[identity(obj)] = obj, source
    if not manifests and not problems:
        problems = [f"no KVCachePool or InferenceEngine in {', '.join(paths)}", *skipped]
    if problems:
        raise CannotPlan(*problems)
    return list(manifests.values()), skipped


def _documents(paths: Sequence[str], problems: list[str]) -> Iterator[tuple[str, Json]]:
    for path in _files(paths, problems):
        try:
            text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
            documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{path}: {error.strerror if isinstance(error, OSError) else error}")
            continue
        except (yaml.YAMLError, RecursionError) as error:
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
