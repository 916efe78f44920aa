"""The chart's certificates: who gets them, and that every process and probe speaks what its peer speaks."""

from __future__ import annotations

import pytest
import yaml

from tests.helm.chart import MATRIX, Object, Values, of_kind, pod_of, pods, render, template, the

TLS, KUBERAY = MATRIX["tls"], MATRIX["tls-kuberay"]
MOUNT = {"name": "tls", "mountPath": "/etc/baton-tls", "readOnly": True}
WITHOUT = {"redis", "ray-store", "head"}
"""Components that run none of Baton's own processes, or none that listens."""


def _config(objects: tuple[Object, ...]) -> Object:
    found: Object = yaml.safe_load(the(objects, "ConfigMap", "baton-config")["data"]["baton.yaml"])
    return found


def test_every_process_has_the_certificate_that_its_settings_name() -> None:
    for values, secret in ((TLS, "baton-tls"), (KUBERAY, "certificates")):
        objects = render(values)
        cluster = _config(objects)["cluster"]
        for name, file in (("tls_certificate", "tls.crt"), ("tls_key", "tls.key"), ("tls_ca", "ca.crt")):
            assert cluster[name] == f"/etc/baton-tls/{file}"
        volume = {"name": "tls", "secret": {"secretName": secret, "defaultMode": 0o440}}
        for pod in pods(objects):
            if pod.component in WITHOUT:
                continue
            assert volume in pod.spec["volumes"], pod.owner
            own = [each for each in pod.containers if not each["name"].endswith(("ray", "keys", "settings"))]
            assert own
            assert all(MOUNT in each["volumeMounts"] for each in own), pod.owner


def test_an_issuer_draws_a_certificate_of_all_names() -> None:
    spec = the(render(TLS), "Certificate", "baton")["spec"]
    assert spec["issuerRef"] == {"name": "ca", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    assert {"baton", "localhost", "baton.serving.svc", "baton.example"} <= set(spec["dnsNames"])
    assert {"server auth", "client auth"} <= set(spec["usages"])
    assert not of_kind(render(KUBERAY), "Certificate"), "a Secret is named"
    renamed = render(Values(sets=("tls.issuer.name=ca", "config.cluster.tls_name=members")))
    assert "members" in the(renamed, "Certificate", "baton")["spec"]["dnsNames"]


def test_the_chart_s_redis_speaks_tls_where_its_certificate_has_its_name() -> None:
    named = Values(sets=(*KUBERAY.sets, "redis.tls=true"))
    for values, scheme in ((TLS, "rediss"), (KUBERAY, "redis"), (named, "rediss"), (MATRIX["defaults"], "redis")):
        objects = render(values)
        urls = [
            each["value"]
            for pod in pods(objects)
            for container in pod.containers
            for each in container.get("env", ())
            if each["name"] == "BATON_INDEX_REDIS_URL"
        ]
        assert urls
        assert {url.partition(":")[0] for url in urls} == {scheme}
        (container,) = pod_of(objects, "redis").containers
        assert ("--tls-port" in container["command"]) == (MOUNT in container["volumeMounts"]) == (scheme == "rediss")
        if values.sets:  # the other has no store with TLS, whatever is set
            assert "--tls-port" not in pod_of(objects, "ray-store").containers[0]["command"]
    assert "baton-redis.serving.svc" in the(render(TLS), "Certificate", "baton")["spec"]["dnsNames"]


def test_spans_leave_over_tls_with_an_issuer_unless_values_say_otherwise() -> None:
    for values, expected in (
        (Values(sets=(*TLS.sets, "config.telemetry.otlp_endpoint=otlp:4317")), True),
        (
            Values(sets=(*TLS.sets, "config.telemetry.otlp_endpoint=otlp:4317", "config.telemetry.otlp_tls=false")),
            False,
        ),
        (Values(sets=(*KUBERAY.sets, "config.telemetry.otlp_endpoint=otlp:4317")), False),
        (TLS, False),
    ):
        assert _config(render(values))["telemetry"].get("otlp_tls", False) is expected


def test_probes_and_scrapers_speak_tls() -> None:
    objects = render(TLS)
    router = the(objects, "Deployment", "baton-router")["spec"]["template"]["spec"]["containers"][0]
    controller = the(objects, "Deployment", "baton-controller")["spec"]["template"]["spec"]["containers"][1]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert router[probe]["httpGet"]["scheme"] == "HTTPS"
        assert controller[probe]["tcpSocket"] == {"port": 50052}
    (endpoint,) = the(objects, "ServiceMonitor", "baton")["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", "baton")
    assert {port["appProtocol"] for port in the(objects, "Service", "baton")["spec"]["ports"]} == {"https"}
    test = the(objects, "Pod", "baton-test-generate")["spec"]["containers"][0]
    assert {"name": "BATON_CA", "value": "/etc/baton-tls/ca.crt"} in test["env"]
    assert _config(objects)["router"]["tls_client_certificates"] == "required"


def test_without_values_nothing_speaks_of_tls() -> None:
    objects = render()
    assert not of_kind(objects, "Certificate")
    assert "tls" not in yaml.safe_dump_all(each for each in objects if each["kind"] != "ConfigMap")
    assert not [name for section in _config(objects).values() for name in section if name.startswith("tls")]


@pytest.mark.parametrize(
    "certificates", [TLS.sets, KUBERAY.sets, ("config.cluster.tls_certificate=/certificates/tls.crt",)]
)
def test_rdma_beside_certificates_needs_a_trusted_network(certificates: tuple[str, ...]) -> None:
    rdma = (*certificates, "pools.decode.rdma.enabled=true", "worker.gpu.count=1")
    done = template(4, Values(sets=rdma))
    assert done.returncode != 0
    assert "the decode pool has RDMA devices, but KV would go over TCP" in done.stderr
    assert "config.transfer.plaintext_transports=[nccl]" in done.stderr
    trusted = render(Values(sets=(*rdma, "config.transfer.plaintext_transports={nccl}")))
    assert _config(trusted)["transfer"]["plaintext_transports"] == ["nccl"]
    assert template(4, Values(sets=("pools.decode.rdma.enabled=true", "worker.gpu.count=1"))).returncode == 0


def test_what_needs_a_certificate_is_refused_without() -> None:
    done = template(4, Values(sets=("tls.clientCertificates=required",)))
    assert done.returncode != 0
    assert "tls.issuer.name or tls.existingSecret" in done.stderr
    done = template(4, Values(sets=("redis.tls=true",)))
    assert done.returncode != 0
    assert "redis.tls is true, which needs tls.issuer.name" in done.stderr
