"""The manifests against Kubernetes' schemas, against each other, and against the service that they run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.app import create_app
from service.process.workers import MARGIN
from service.settings import Settings
from tests.service.conftest import settings

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"
FILES = sorted(FOLDER.rglob("*.yaml"))
FOREIGN = {"Kustomization", "ServiceMonitor"}  # kustomize's and the Prometheus operator's, of which Kubernetes has no schema
KUSTOMIZE = next((command for command in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(command[0])), None)

Manifest = dict[str, Any]


def read(path: Path) -> Manifest:
    found: Manifest = yaml.safe_load(path.read_text())
    return found


def built(name: str) -> dict[str, Manifest]:
    """What `kubectl apply -k` would apply, by kind; put together here, since not every machine has kustomize."""
    kustomization = read(FOLDER / name / "kustomization.yaml")
    found: dict[str, Manifest] = {}
    for resource in kustomization["resources"]:
        path = FOLDER / name / resource
        found |= built(path.name) if path.is_dir() else {read(path)["kind"]: read(path)}
    for patch in kustomization.get("patches", []):
        change = read(FOLDER / name / patch["path"])
        found[change["kind"]] = merged(found[change["kind"]], change)
    for pairs in (each["pairs"] for each in kustomization.get("labels", [])):
        for kind, manifest in found.items():
            for place in ("metadata.labels", *LABELLED.get(kind, ())):
                at(manifest, place).update(pairs)
    for image in kustomization.get("images", []):
        for container in pod(found)["containers"]:
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['name']}:{image['newTag']}"
    return found


# Where kustomize's includeSelectors puts labels, beside metadata.
LABELLED = {
    "Deployment": ("spec.selector.matchLabels", "spec.template.metadata.labels"),
    "Service": ("spec.selector",),
    "PodDisruptionBudget": ("spec.selector.matchLabels",),
    "NetworkPolicy": ("spec.podSelector.matchLabels",),
}


def at(manifest: Manifest, place: str) -> Manifest:
    for name in place.split("."):
        manifest = manifest.setdefault(name, {})
    return manifest


def merged(base: Any, change: Any) -> Any:
    """A strategic merge, as far as our patches go: lists of named things by name, other lists whole."""
    if isinstance(base, dict) and isinstance(change, dict):
        return base | {key: merged(base[key], value) if key in base else value for key, value in change.items()}
    if isinstance(base, list) and all("name" in each for each in [*base, *change]):
        changes = {each["name"]: each for each in change}
        rest = [each for each in change if each["name"] not in {old["name"] for old in base}]
        return [merged(each, changes[each["name"]]) if each["name"] in changes else each for each in base] + rest
    return change


def check(manifest: Manifest) -> None:
    import kubernetes_validate  # here, or each process that runs tests would spend seconds on it

    if manifest["kind"] not in FOREIGN:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def pod(manifests: dict[str, Manifest]) -> Manifest:
    found: Manifest = manifests["Deployment"]["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "base"], ids=lambda path: path.name)
def test_every_base_manifest_matches_the_kubernetes_schema(path: Path) -> None:
    """An overlay's files are parts, and make sense only when they are put together."""
    check(read(path))


def test_the_kustomizations_use_every_file() -> None:
    for name in ("base", "gpu"):
        kustomization = read(FOLDER / name / "kustomization.yaml")
        used = kustomization["resources"] + [patch["path"] for patch in kustomization.get("patches", [])]
        assert {"kustomization.yaml", *used} - {"../base"} == {path.name for path in FILES if path.parent.name == name}


def test_one_gpu_is_enough_for_a_rollout() -> None:
    """A second pod would wait for a GPU and be the one pod that a rollout may lack, so the first would never make room."""
    manifests = built("gpu")
    assert manifests["HorizontalPodAutoscaler"]["spec"]["minReplicas"] == 1
    assert manifests["Deployment"]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_the_guide_sets_the_image_in_the_folder_it_applies() -> None:
    guide = (FOLDER.parents[1] / "docs" / "operations.md").read_text()
    (named,) = re.findall(r"cd (docker/kubernetes/\S+) && kustomize edit set image capserve=", guide)
    (applied,) = re.findall(r"kubectl apply -k (docker/kubernetes/\S+)$", guide, re.MULTILINE)
    assert named == applied


@pytest.mark.parametrize("name", ["base", "gpu"])
class TestBuilt:
    def test_manifests_match_the_kubernetes_schema(self, name: str) -> None:
        for manifest in built(name).values():
            check(manifest)

    @pytest.mark.skipif(KUSTOMIZE is None, reason="neither kustomize nor kubectl is installed")
    def test_kustomize_builds_the_same_manifests(self, name: str) -> None:
        assert KUSTOMIZE is not None
        done = subprocess.run([*KUSTOMIZE, str(FOLDER / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert {manifest["kind"]: manifest for manifest in yaml.safe_load_all(done.stdout)} == built(name)

    def test_all_selectors_match_the_same_pods(self, name: str) -> None:
        manifests = built(name)
        labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
        selectors = [
            manifests["Deployment"]["spec"]["selector"]["matchLabels"],
            manifests["Service"]["spec"]["selector"],
            manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
            manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
            pod(manifests)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
        ]
        assert selectors == [labels] * len(selectors)
        assert labels
        monitor = manifests["ServiceMonitor"]["spec"]
        assert monitor["selector"]["matchLabels"].items() <= manifests["Service"]["metadata"]["labels"].items()
        assert manifests["Service"]["metadata"]["labels"][monitor["jobLabel"]] == "capserve"  # the job that our rules name
        target = manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == ("Deployment", manifests["Deployment"]["metadata"]["name"])

    def test_ports_and_paths_match_the_service(self, name: str) -> None:
        manifests = built(name)
        (container,) = pod(manifests)["containers"]
        (port,) = container["ports"]
        (outside,) = manifests["Service"]["spec"]["ports"]
        (scraped,) = manifests["ServiceMonitor"]["spec"]["endpoints"]
        (let_in,) = manifests["NetworkPolicy"]["spec"]["ingress"][0]["ports"]
        assert port["containerPort"] == Settings.model_fields["port"].default
        assert outside["targetPort"] == port["name"] == let_in["port"]
        assert scraped["port"] == outside["name"]
        paths = create_app(settings()).openapi()["paths"].keys()
        probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
        assert {probe["port"] for probe in probes} == {port["name"]}
        assert [probe["path"] for probe in probes] == ["/readyz", "/readyz", "/healthz"]
        assert {probe["path"] for probe in probes} | {scraped["path"]} <= paths

    def test_environment_variables_are_valid_settings(self, name: str) -> None:
        (container,) = pod(built(name))["containers"]
        given = {each["name"].removeprefix("CAPSERVE_").lower(): each.get("value") for each in container["env"]}
        values = {name: value for name, value in given.items() if value is not None}
        assert given.keys() <= Settings.model_fields.keys()
        chosen = Settings.model_validate(values)
        assert pod(built(name))["terminationGracePeriodSeconds"] >= chosen.linger + chosen.drain + MARGIN
        assert chosen.linger > 1  # seconds, in which endpoints forget a pod that is not ready any more
        assert chosen.device == {"base": "cpu", "gpu": "cuda"}[name]

    def test_pods_run_with_minimal_privileges(self, name: str) -> None:
        manifests = built(name)
        found = pod(manifests)
        (container,) = found["containers"]
        assert found["securityContext"]["runAsNonRoot"] is True
        assert found["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert found["automountServiceAccountToken"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert manifests["NetworkPolicy"]["spec"]["egress"] == []
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}

    def test_only_the_gpu_overlay_uses_the_gpu_image_and_requests_a_gpu(self, name: str) -> None:
        (container,) = pod(built(name))["containers"]
        assert container["image"].endswith({"base": ":cpu", "gpu": ":gpu"}[name])
        assert container["resources"]["limits"].get("nvidia.com/gpu") == {"base": None, "gpu": "1"}[name]


def test_the_autoscaler_uses_a_metric_that_the_service_exports() -> None:
    scaler = read(FOLDER / "base" / "horizontalpodautoscaler.yaml")["spec"]
    (queue,) = [metric["pods"]["metric"]["name"] for metric in scaler["metrics"] if metric["type"] == "Pods"]
    app = create_app(settings())
    app.state.service.catalogue.measure()
    assert f"{queue}{{" in app.state.service.metrics.text().decode()
