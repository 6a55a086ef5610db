"""`epochkv plan` without a cluster: what it reads, what it refuses, and how it says so."""

import copy
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_operator.preview import CannotPlan, Outcome, Subject, outcomes, read
from tests.support.api.cases import Case
from tests.support.api.corpus import CASES
from tests.support.cli import inside
from tests.support.planning import CONTEXT

Json = dict[str, Any]


def pool(name: str = "policy", **spec: Any) -> Json:
    full = {"local": {"capacity": "1Gi"}, **spec}
    return {"apiVersion": "epochkv.io/v1alpha1", "kind": "KVCachePool", "metadata": {"name": name}, "spec": full}


def engine(name: str = "rollout", **spec: Any) -> Json:
    full = {"model": {"name": "tiny"}, "poolRef": {"name": "policy"}, **spec}
    return {"apiVersion": "epochkv.io/v1alpha1", "kind": "InferenceEngine", "metadata": {"name": name}, "spec": full}


def found(*paths: Path | str, stdin: str = "", namespace: str | None = None) -> tuple[list[tuple[Json, str]], list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(stdin))
        return read([str(path) for path in paths], namespace, "default")


def refused(*paths: Path | str, **options: Any) -> str:
    with pytest.raises(CannotPlan) as error:
        found(*paths, **options)
    return str(error.value)


def write(file: Path, *documents: Any) -> Path:
    file.write_text(yaml.safe_dump_all(documents))
    return file


def test_files_folders_lists_documents_and_standard_input(tmp_path: Path) -> None:
    write(tmp_path / "two.yaml", pool("a"), None, engine("b"))
    (tmp_path / "one.json").write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": [pool("c"), engine("d")]}))
    write(tmp_path / "other.yml", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}, {"apiVersion": "example.org/v1"})
    (tmp_path / "notes.txt").write_text("no: manifest")
    manifests, skipped = found(tmp_path, "-", stdin=yaml.safe_dump(pool("e")))
    assert [obj["metadata"]["name"] for obj, _ in manifests] == ["c", "d", "a", "b", "e"]
    assert manifests[-1][1] == "standard input"
    assert skipped == [
        f"skipped, not a kind of EpochKV: {tmp_path}/other.yml, document 1: ConfigMap x",
        f"skipped, not a kind of EpochKV: {tmp_path}/other.yml, document 2: an object without a kind without a name",
    ]


def test_namespaces_are_filled_in_and_must_agree(tmp_path: Path) -> None:
    own = {**pool(), "metadata": {"name": "policy", "namespace": "rl"}}
    file = write(tmp_path / "f.yaml", own, engine())
    assert [obj["metadata"]["namespace"] for obj, _ in found(file)[0]] == ["rl", "default"]
    assert [obj["metadata"]["namespace"] for obj, _ in found(file, namespace="rl")[0]] == ["rl", "rl"]
    assert "f.yaml, document 1: KVCachePool policy: metadata.namespace is rl, and --namespace is other" in refused(file, namespace="other")


def test_every_problem_is_named_at_once_with_file_object_field_and_fix(tmp_path: Path) -> None:
    wrong: list[Any] = [pool(local={"capacity": "64GB"}), engine(replicas="hunter2"), pool("twice"), pool("twice")]
    wrong += [{**pool("old"), "apiVersion": "epochkv.io/v1beta7"}, {**pool(), "metadata": None}, ["a list"], engine("misspelt", replica=2)]
    file = write(tmp_path / "f.yaml", *wrong)
    text = refused(file, tmp_path / "missing.yaml")
    assert text.splitlines() == [
        f"{file}, document 1: KVCachePool default/policy: spec.local.capacity: '64GB' must be a Kubernetes quantity such as 64Gi,"
        " 500M or 2",
        f"{file}, document 2: InferenceEngine default/rollout: spec.replicas: Input should be a valid integer",
        f"{file}, document 4: KVCachePool twice is also in {file}, document 3: keep one",
        f"{file}, document 5: KVCachePool old: apiVersion is epochkv.io/v1beta7: this version of epochkv has epochkv.io/v1alpha1",
        f"{file}, document 6: KVCachePool default/: metadata.name: it is required",
        f"{file}, document 7: not an object with apiVersion, kind and metadata",
        f"{file}, document 8: InferenceEngine default/misspelt: spec.replica: unknown field",
        f"{tmp_path}/missing.yaml: No such file or directory",
    ]


def test_dates_are_text_as_they_are_for_kubectl(tmp_path: Path) -> None:
    dated = {**pool(), "metadata": {"name": "policy", "annotations": {"made": "DATE"}}}
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(dated).replace("DATE", "2026-01-31"))
    [(obj, _)] = found(tmp_path / "f.yaml")[0]
    assert obj["metadata"]["annotations"] == {"made": "2026-01-31"}


def test_no_yaml_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("kind: KVCachePool\nmetadata: {name: [}\n")
    assert refused(file).startswith(f"{file}, line 2: not YAML: ")
    file.write_text("a: &a {x: 1, <<: {x: 3}}\nb: {<<: *a, x: 2}\nc: {y: 1,\n  y: 2}\n")  # kubectl refuses it, too
    assert refused(file).startswith(f"{file}, line 4: not YAML: the key y is there twice")
    file.write_text("[" * 100_000)
    assert refused(file).startswith(f"{file}: not YAML: ")
    (tmp_path / "empty").mkdir()
    assert "the folder has no .yaml, .yml, .json files" in refused(tmp_path / "empty")


def test_the_command_shows_what_is_made_and_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "f.yaml", engine(replicas=3), pool(), {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "trainer"}})
    status, output, errors = inside(capsys, "plan", "-f", str(file))
    assert status == 0, errors
    assert output == (
        f"KVCachePool default/policy: new ({file}, document 2)\n"
        "  apply ConfigMap default/policy-connection: it does not exist\n"
        "\n"
        f"InferenceEngine default/rollout: new ({file}, document 1)\n"
        "  apply ServiceAccount default/rollout: it does not exist\n"
        "  apply Deployment default/rollout: it does not exist; starts 3 pods\n"
        "    each pod: 1Gi of memory, vLLM with --shutdown-timeout 40 --model tiny --port 8000 --served-model-name tiny"
        " --enable-prompt-tokens-details --kv-transfer-config {...}\n"
        "  apply Service default/rollout: it does not exist\n"
        "  apply PodDisruptionBudget default/rollout: it does not exist\n"
        "\n"
        "Plan: no pod would be replaced.\n"
    )
    assert errors == f"epochkv: skipped, not a kind of EpochKV: {file}, document 3: Pod trainer\n"
    _, output, _ = inside(capsys, "plan", "-f", str(file), "-o", "json")
    shown = json.loads(output)
    assert (shown["podsReplaced"], shown["objects"][1]["name"], shown["objects"][1]["new"]) == (0, "rollout", True)
    assert shown["objects"][1]["steps"][1] == "apply Deployment default/rollout: it does not exist; starts 3 pods"
    assert shown["objects"][1]["apply"][1]["spec"]["replicas"] == 3


def test_the_command_shows_what_a_wide_engine_is_computed_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"tensor": 2, "data": 4, "expert": True, "nodes": 2}
    wide = engine(parallelism=shape, resources={"limits": {"memory": "64Gi"}})
    status, output, _ = inside(capsys, "plan", "-f", str(write(tmp_path / "f.yaml", wide, pool(local={"capacity": "32Gi"}))))
    assert status == 0
    [line] = [line for line in output.splitlines() if line.startswith("    each pod: ")]
    assert line.startswith("    each pod: 96Gi of memory, vLLM with ")
    assert " --tensor-parallel-size 2 --data-parallel-size 4 --enable-expert-parallel --nnodes 2 " in line
    asked = engine(resources={"limits": {"nvidia.com/gpu": "1"}, "requests": {"memory": "32Gi"}})
    _, output, _ = inside(capsys, "plan", "-f", str(write(tmp_path / "f.yaml", asked, pool())))
    assert "    each pod: 33Gi of memory, vLLM with " in output, "what is only requested is shown beside other limits"


@pytest.mark.parametrize("number", [2**70, -(2**70)])
def test_numbers_beyond_64_bits_are_refused_as_their_field_says(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int) -> None:
    status, _, errors = inside(capsys, "plan", "-f", str(write(tmp_path / "f.yaml", pool(local={"capacity": number}))))
    assert status == 1
    assert "KVCachePool default/policy: spec.local.capacity: " in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind[:3]}-{case.id}")
def test_files_alone_are_refused_for_what_the_api_server_refuses(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the schema, the models say it in their own words."""
    document = {"apiVersion": "epochkv.io/v1alpha1", "kind": case.kind, "metadata": {"name": case.name}}
    file = write(tmp_path / "f.yaml", document if case.spec is None else {**document, "spec": case.spec})
    status, output, errors = inside(capsys, "plan", "-f", str(file))
    if case.says is None:
        assert errors == ""
        assert status == 0 or "! the operator would change nothing" in output
        return
    assert status == 1
    assert case.schema or all(fragment in errors for fragment in case.says), errors
    assert "hunter2" not in errors
    assert not re.search(r"(spec[.\w]*): \1:", errors), "a field is named once"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *(("", "--filename"), ("-f x --unknown", "--unknown"), ("-f x -o xml", "xml")),
        *(("-f x --context prod", "--context needs --live"), ("-f no-such-file.yaml", "no-such-file.yaml: No such file")),
    ],
)
def test_mistakes_end_with_1_as_2_says_that_pods_go(capsys: pytest.CaptureFixture[str], arguments: str, says: str) -> None:
    status, output, errors = inside(capsys, "plan", *arguments.split())
    assert (status, output) == (1, "")
    assert says in errors


def test_a_template_that_belongs_to_the_operator_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CEL cannot see into templates, so admission takes it, and the operator would report it in a condition."""
    wrong = engine(template={"spec": {"containers": [{"name": "engine", "image": "x"}]}})
    status, output, _ = inside(capsys, "plan", "-f", str(write(tmp_path / "f.yaml", pool(), wrong)))
    assert status == 1
    assert "! the operator would change nothing: InvalidTemplate: spec.template.spec.containers[engine].image belongs" in output


# --------------------------------------------------------------------------- changes, and the pods that they replace
MOONCAKE: Json = {"distributed": {"mooncake": {"store": {"segmentSize": "256Mi", "replicas": 2}}}}


def live(obj: Json) -> Json:
    return {**obj, "metadata": {**obj["metadata"], "namespace": "rl", "uid": f"uid-{obj['metadata']['name']}"}}


def live_pool(**spec: Any) -> Json:
    return live(pool(**spec))


def live_engine(**spec: Any) -> Json:
    return live(engine(**{"replicas": 4, **spec}))


def changed(before: Json | None, after: Json, old_pool: Json | None = None, new_pool: Json | None = None) -> Outcome:
    pools = [{("rl", "policy"): one} if one is not None else {} for one in (old_pool, new_pool)]
    context = replace(CONTEXT, served=frozenset({"LeaderWorkerSet"}))
    [outcome] = outcomes([Subject(before, after, "f.yaml")], pools[0], pools[1], context)
    return outcome


def step(outcome: Outcome, name: str) -> str:
    (found,) = [detail for detail in outcome.details if detail.split(": ")[0].endswith(name)]
    return found


def test_fewer_replicas_with_a_new_image_replace_those_that_stay() -> None:
    outcome = changed(live_engine(), live_engine(replicas=3, image="b"), live_pool(), live_pool())
    said = "what the operator wants has changed: spec.replicas, spec.template.spec.containers[engine].image"
    assert outcome.details == (f"apply Deployment rl/rollout: {said}; replaces 3 pods, at most 1 at a time",)
    assert changed(live_engine(replicas=0), live_engine(replicas=0, image="b"), live_pool(), live_pool()).pods == 0


def test_a_master_is_replaced_all_at_once() -> None:
    after = copy.deepcopy(live_pool(**MOONCAKE))
    after["spec"]["distributed"]["mooncake"]["image"] = "registry.example/mooncake:2"
    outcome = changed(live_pool(**MOONCAKE), after)
    assert step(outcome, "Deployment rl/policy-master").endswith("; replaces 1 pod, all at once")
    assert outcome.pods == 3, "the master and two stores"


def test_a_pool_that_gets_an_l2_restarts_its_engines() -> None:
    old, new = live_pool(local={"capacity": "1Gi"}), live_pool(local={"capacity": "1Gi"}, **MOONCAKE)
    outcome = changed(live_engine(), live_engine(), old, new)
    assert outcome.pods == 4
    assert "connection-hash" in step(outcome, "Deployment rl/rollout")
    assert step(outcome, "NetworkPolicy rl/rollout").endswith("it does not exist")
    lost = changed(new, old)
    assert step(lost, "Deployment rl/policy-master") == "delete Deployment rl/policy-master: the spec has no use for it any more"
    assert changed(live_engine(), live_engine(), None, live_pool()).pods == 4, "an engine before its new pool"


def test_pods_of_groups_are_counted() -> None:
    spread = live_engine(replicas=2, parallelism={"tensor": 3, "nodes": 3})
    assert changed(spread, {**spread, "spec": {**spread["spec"], "image": "b"}}, live_pool(), live_pool()).pods == 6
    assert changed(spread, {**spread, "spec": {**spread["spec"], "replicas": 5}}, live_pool(), live_pool()).pods == 0
