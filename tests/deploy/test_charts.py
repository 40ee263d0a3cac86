"""Helm charts render to what Kubernetes takes and refuse what cannot work; the flat manifests are made from them."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest

from queen.settings import describe_settings
from tests.deploy.tools import DEPLOY, attempt, documents, run, tool
from tests.support.node_packages import install_node_packages

CHARTS: Final = ("queen", "queen-proxy")
KUBERNETES: Final = ("1.30", "1.37")
CUSTOM: Final = {"keda.sh/v1alpha1", "monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"}
"""Custom resources whose schemas npm has."""
UNCHECKED: Final = {"networking.gke.io/v1"}
"""Google's schemas are a large package: this one resource was checked by hand."""

VALUES: Final[dict[str, tuple[str, ...]]] = {
    "defaults": (),
    "production": ("--values", "values-prod.yaml"),
    "hpa": ("--set", "autoscaling.type=hpa"),
    "keda": ("--set", "autoscaling.type=keda"),
    "embedded": ("--set", "postgres.embedded=true,replicas=1"),
    "bare": (
        "--set",
        "persistence.enabled=false,peers.enabled=false,networkPolicy.enabled=false,podDisruptionBudget.enabled=false,"
        "serviceAccount.create=false,service.sessionAffinity=None",
    ),
    "everything": (
        "--set",
        "serviceMonitor.enabled=true,prometheusRule.enabled=true,serviceMonitor.labels.release=prom,"
        "image.pullSecrets={registry},podLabels.team=a,podAnnotations.note=b,nodeSelector.disk=ssd,"
        "persistence.storageClassName=fast,tolerations[0].operator=Exists,priorityClassName=high",
    ),
}
PROXY_VALUES: Final[dict[str, tuple[str, ...]]] = {
    "defaults": (),
    "production": ("--values", "values-prod.yaml"),
    "scaled": ("--set", "autoscaling.enabled=true"),
    "forward-auth": ("--set", "queenServerUrl=,googleAuth.enabled=true,env=stage"),
}
CASES: Final = [
    *((chart, name, arguments) for chart, cases in zip(CHARTS, (VALUES, PROXY_VALUES), strict=True)
      for name, arguments in cases.items())
]  # fmt: skip


def rendered(chart: str, *arguments: str) -> list[dict[str, Any]]:
    return documents(run(*template(chart, *arguments)))


def template(chart: str, *arguments: str) -> list[str]:
    directory = DEPLOY / "helm" / chart
    given = [str(directory / part) if part.startswith("values-") else part for part in arguments]
    return [tool("helm"), "template", chart, str(directory), "--namespace", "queen", *given]


def one(resources: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [resource for resource in resources if resource["kind"] == kind]
    return found


def container(resources: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = one(resources, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def environment(resources: list[dict[str, Any]]) -> dict[str, Any]:
    return {item["name"]: item.get("value") for item in container(resources)["env"]}


@pytest.mark.parametrize("chart", CHARTS)
def test_charts_pass_helms_own_check(chart: str) -> None:
    directory = DEPLOY / "helm" / chart
    run(tool("helm"), "lint", "--strict", directory)
    run(tool("helm"), "lint", "--strict", directory, "--values", directory / "values-prod.yaml")


@pytest.mark.parametrize(("chart", "name", "arguments"), CASES)
def test_charts_render_to_resources_that_kubernetes_takes(chart: str, name: str, arguments: tuple[str, ...]) -> None:
    resources = rendered(chart, *arguments)
    names = Counter((resource["kind"], resource["metadata"]["name"]) for resource in resources)
    assert [each for each, count in names.items() if count > 1] == []
    for resource in resources:
        assert resource["metadata"]["namespace"] == "queen"
        if resource["apiVersion"] not in CUSTOM | UNCHECKED:
            for version in KUBERNETES:
                kubernetes_validate.validate(resource, version, strict=True)


def test_flat_manifests_are_those_of_the_charts(tmp_path: Path) -> None:
    helm = Path(tool("helm"))
    run(DEPLOY / "kubernetes" / "render.sh", tmp_path, env=os.environ | {"PATH": f"{helm.parent}:{os.environ['PATH']}"})
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(made) == 4
    for name, text in made.items():
        assert (DEPLOY / "kubernetes" / name).read_text() == text, f"{name} is out of date: run `make manifests`"


def test_flat_manifests_are_resources_that_kubernetes_takes() -> None:
    for path in (DEPLOY / "kubernetes").glob("*.yaml"):
        for resource in documents(path.read_text()):
            if resource["apiVersion"] not in CUSTOM:
                kubernetes_validate.validate(resource, KUBERNETES[-1], strict=True)


def test_custom_resources_are_what_their_operators_take() -> None:
    resources = [
        *rendered("queen", *VALUES["everything"]),
        *rendered("queen", *VALUES["keda"]),
        *rendered("queen-proxy", *PROXY_VALUES["production"]),
        *documents((DEPLOY / "kubernetes" / "keda-consumers.yaml").read_text()),
    ]
    custom = [resource for resource in resources if resource["apiVersion"] in CUSTOM]
    kinds = {resource["kind"] for resource in custom}
    assert kinds == {"ScaledObject", "ServiceMonitor", "PrometheusRule", "HTTPRoute"}
    # What is wrong is found, and nothing else.
    wrong = [{**resource, "metadata": {"name": "wrong"}, "spec": "bogus"} for resource in custom]
    faults = faults_of([*custom, *wrong])
    assert [fault.partition(":")[0] for fault in faults] == [f"{resource['kind']} wrong" for resource in wrong], faults


def faults_of(resources: list[dict[str, Any]]) -> list[str]:
    directory = Path(__file__).with_name("js")
    install_node_packages(directory)
    faults: list[str] = json.loads(run("node", directory / "validate.js", stdin=json.dumps(resources)))
    return faults


@pytest.mark.parametrize("chart", CHARTS)
def test_pods_run_without_privileges_on_a_file_system_they_cannot_write_to(chart: str) -> None:
    resources = rendered(chart)
    pod = one(resources, "StatefulSet")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(resources)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["mountPath"] for mount in container(resources)["volumeMounts"]}
    assert {"/tmp", "/var/lib/queen"} <= mounted


def test_servers_are_restarted_by_livez_and_routed_to_by_readyz() -> None:
    probed = container(rendered("queen"))
    assert probed["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert probed["startupProbe"]["httpGet"]["path"] == "/livez"
    assert probed["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_servers_find_each_other_by_the_headless_service() -> None:
    resources = rendered("queen")
    headless = next(
        resource
        for resource in resources
        if resource["kind"] == "Service" and resource["spec"].get("clusterIP") == "None"
    )
    name = headless["metadata"]["name"]
    assert one(resources, "StatefulSet")["spec"]["serviceName"] == name
    assert environment(resources)["QUEEN_UDP_PEERS"] == f"{name}.queen.svc"
    ports = {(port["name"], port["protocol"], port["port"]) for port in headless["spec"]["ports"]}
    assert ports == {("http", "TCP", 6632), ("peers", "UDP", 6633)}


def test_variables_of_the_server_are_settings_that_exist() -> None:
    known = {setting.variable for setting in describe_settings()}
    for arguments in VALUES.values():
        assert set(environment(rendered("queen", *arguments))) <= known


def test_whole_numbers_arrive_as_they_were_written() -> None:
    assert environment(rendered("queen", "--values", "values-prod.yaml"))["RETENTION_INTERVAL"] == "600000"


def test_no_secret_is_written_into_a_manifest() -> None:
    used = container(rendered("queen", *VALUES["production"]))
    assert used["envFrom"] == [{"secretRef": {"name": "queen-postgres"}}, {"secretRef": {"name": "queen-secrets"}}]
    (signing,) = [item for item in used["env"] if item["name"] == "QUEEN_SYNC_SECRET"]
    assert signing["valueFrom"]["secretKeyRef"] == {"name": "queen-sync", "key": "secret"}


def test_the_secret_of_google_is_mounted_when_it_is_asked_for() -> None:
    def secrets(*arguments: str) -> list[str]:
        return [item["secretRef"]["name"] for item in container(rendered("queen-proxy", *arguments))["envFrom"]]

    assert secrets() == ["queen-postgres", "queen-mq-proxy"]
    assert secrets("--set", "googleAuth.enabled=true")[2:] == ["queen-mq-proxy-google-prod"]
    assert secrets("--values", "values-prod.yaml")[2:] == ["queen-proxy-google"]


def test_the_host_name_of_the_proxy_is_routed_to_it() -> None:
    resources = rendered("queen-proxy", "--values", "values-prod.yaml")
    route = one(resources, "HTTPRoute")["spec"]
    service = one(resources, "Service")
    assert route["hostnames"] == ["queen.example.com"]
    assert route["rules"][0]["backendRefs"] == [{"name": service["metadata"]["name"], "port": 3000}]
    policy = one(resources, "HealthCheckPolicy")["spec"]
    assert policy["default"]["config"]["httpHealthCheck"]["requestPath"] == "/health/ready"
    assert policy["targetRef"]["name"] == service["metadata"]["name"]


@pytest.mark.parametrize(
    ("chart", "value", "reason"),
    [
        ("queen", "postgres.embedded=true", "each pod would have a PostgreSQL of its own"),
        ("queen", "postgres.embedded=true,replicas=1,persistence.enabled=false", "every message is lost"),
        ("queen", "settings.PG_PASSWORD=x", "settings.PG_PASSWORD is a secret"),
        ("queen", "settings.PORT=1", "settings.PORT is set by the chart"),
        ("queen", "settings.SHUTDOWN_DELAY_MS=55000", "terminationGracePeriodSeconds must be at least 10 s longer"),
        ("queen", "replicaCount=3", "Additional property replicaCount is not allowed"),
        ("queen", "replicas=0", "replicas"),
        ("queen", "settings.log_level=info", "log_level"),
        ("queen", "persistence.size=lots", "persistence.size"),
        ("queen", "autoscaling.type=vpa", "autoscaling.type"),
        ("queen-proxy", "httpRoute.enabled=true", "needs proxyHostName"),
        ("queen-proxy", "settings.JWT_SECRET=x", "settings.JWT_SECRET is a secret"),
    ],
)
def test_values_that_cannot_work_are_refused_with_the_reason(chart: str, value: str, reason: str) -> None:
    done = attempt(*template(chart, "--set", value))
    assert done.returncode != 0
    assert reason in done.stderr
