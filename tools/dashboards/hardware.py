"""Dashboard of GPUs, containers and pods, from dcgm-exporter, the kubelet (cAdvisor) and kube-state-metrics.

The pods of a release have the same name prefix as its routers. If Prometheus keeps the labels of its targets,
dcgm-exporter's `namespace` and `pod` arrive as `exported_namespace` and `exported_pod`; outside Kubernetes it has none.
"""

from __future__ import annotations

from tools.dashboards.model import Dashboard, Kind, Lead, Panel, Section, Variable

OF_RELEASE = "($prefix-.*)?"
OF_POD = f'namespace="$namespace", pod=~"$pod", pod=~"{OF_RELEASE}"'
OF_CONTAINER = f'{OF_POD}, container!="", container!="POD"'

PREFIX = Variable(
    name="prefix",
    metric="baton_build_info{$cluster}",
    label="pod",
    title="Pods' prefix",
    has_all=False,
    pattern="/^(.+)-router-/",
)
POD = Variable(
    name="pod",
    metric=f'container_memory_working_set_bytes{{namespace="$namespace", pod=~"{OF_RELEASE}"}}',
    label="pod",
    title="Pod",
)


def gpus(metric: str) -> str:
    """Return the query of a dcgm-exporter metric, once for each GPU of the selected pods."""
    exported = f'exported_namespace="$namespace", exported_pod=~"$pod", exported_pod=~"{OF_RELEASE}"'
    return (
        f'max by (pod, gpu, Hostname) (label_join({metric}{{{exported}}}, "pod", "", "exported_pod") '
        f'or {metric}{{exported_namespace="", {OF_POD}}})'
    )


def per_container(counter: str) -> str:
    """Return the rate of one of cAdvisor's counters, by container."""
    return f"sum by (pod, container) (rate({counter}{{{OF_CONTAINER}}}[$__rate_interval]))"


def limit(resource: str) -> str:
    return f'max by (pod, container) (kube_pod_container_resource_limits{{{OF_CONTAINER}, resource="{resource}"}})'


OF_GPU, OF_ONE = "{{pod}} GPU {{gpu}}", "{{pod}} {{container}}"
DCGM = "Empty: Prometheus does not scrape NVIDIA's dcgm-exporter (GPU Operator)."
NETWORK = "sum by (pod) (rate(container_network_{way}_bytes_total{{{pods}}}[$__rate_interval]))"
USED, FREE = gpus("DCGM_FI_DEV_FB_USED"), gpus("DCGM_FI_DEV_FB_FREE")
MEMORY = f"max by (pod, container) (container_memory_working_set_bytes{{{OF_CONTAINER}}})"
THROTTLED, PERIODS = (per_container(f"container_cpu_cfs_{name}_total") for name in ("throttled_periods", "periods"))

SOURCES = Section(
    "Scraped sources",
    tuple(
        Panel(
            title=title,
            description=f"{meaning} 0: {source} is not scraped, and the panels that need it are empty.",
            unit="short",
            queries={"": f"count({expression}) or $zero"},
            kind=Kind.STAT,
            width=8,
            height=3,
        )
        for title, meaning, source, expression in (
            (
                "GPUs seen",
                "GPUs of the release's pods.",
                "NVIDIA's dcgm-exporter, with its labels of pods,",
                gpus("DCGM_FI_DEV_GPU_UTIL"),
            ),
            ("Containers seen", "Containers of the release's pods.", "cAdvisor, a part of the kubelet,", MEMORY),
            (
                "Pods seen",
                "Pods of the release.",
                "kube-state-metrics",
                f"max by (pod) (kube_pod_status_phase{{{OF_POD}}})",
            ),
        )
    ),
)

GPUS = Section(
    "GPUs",
    (
        Panel(
            title="GPU in use",
            description="Share of the time in which a kernel ran. A decode worker with sequences is near 100 %. A "
            f"worker that serves and is near 0 waits for KV or for its processor. {DCGM}",
            unit="percent",
            queries={OF_GPU: gpus("DCGM_FI_DEV_GPU_UTIL")},
            width=8,
            leads=(Lead("pools", "Running sequences"),),
        ),
        Panel(
            title="Tensor cores and memory in use",
            description="Shares of the cycles in which tensor cores, and the memory bus, were busy. Prefill is bound "
            "by the first, decode by the second. If both are low under load, batches are too small. "
            f"{DCGM}",
            unit="percentunit",
            queries={
                f"tensor {OF_GPU}": gpus("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
                f"memory {OF_GPU}": gpus("DCGM_FI_PROF_DRAM_ACTIVE"),
            },
            width=8,
        ),
        Panel(
            title="GPU memory in use",
            description="Share of a GPU's memory that is allocated. It is constant while a worker serves. If it "
            f"rises, another process uses the GPU. {DCGM}",
            unit="percentunit",
            queries={OF_GPU: f"{USED} / ({USED} + {FREE})"},
            width=8,
            bad_above=0.98,
            leads=(Lead("pools", "KV in use"),),
        ),
        Panel(
            title="Power",
            description="Power of a GPU in watts. A GPU that uses far less than others under the same load is "
            f"throttled, or has less to do. {DCGM}",
            unit="watt",
            queries={OF_GPU: gpus("DCGM_FI_DEV_POWER_USAGE")},
            width=8,
        ),
        Panel(
            title="Temperature",
            description="Temperature of a GPU. Above about 85 degrees it lowers its clock, and its worker becomes "
            f"slower than the others: `baton drain WORKER`, and check the node's cooling. {DCGM}",
            unit="celsius",
            queries={OF_GPU: gpus("DCGM_FI_DEV_GPU_TEMP")},
            width=8,
            bad_above=85,
        ),
        Panel(
            title="NVLink and PCIe",
            description="Bytes per second of a GPU over NVLink, as DCGM counts them, and over PCIe. KV transfers "
            "between GPUs of one node should use NVLink; if they use PCIe, see the connections by "
            "transport. dcgm-exporter exports NVLink's bytes only if its list of counters has "
            "DCGM_FI_PROF_NVLINK_TX_BYTES and DCGM_FI_PROF_NVLINK_RX_BYTES.",
            unit="Bps",
            queries={
                f"{link} {name} {OF_GPU}": gpus(f"DCGM_FI_PROF_{link.upper()}_{way}_BYTES")
                for link in ("NVLink", "PCIe")
                for way, name in (("TX", "sent"), ("RX", "received"))
            },
            width=8,
            leads=(Lead("kv-transfer", "Connections by transport"), Lead("kv-transfer", "Sent")),
        ),
        Panel(
            title="Last error (XID)",
            description="Number of the last error that the driver reported for a GPU; 0: none. 13, 31, 43 and 45 are a "
            "program's fault, most others the hardware's: drain the workers of that node and reset or replace the GPU.",
            unit="short",
            queries={OF_GPU: gpus("DCGM_FI_DEV_XID_ERRORS")},
            kind=Kind.STATES,
            width=24,
            height=6,
            bad_above=1,
        ),
    ),
)

CONTAINERS = Section(
    "Containers",
    (
        Panel(
            title="Processor",
            description="Processors that a container uses. A router near 1 is at its limit, because one process "
            "serves requests on one processor: add routers.",
            unit="short",
            queries={OF_ONE: per_container("container_cpu_usage_seconds_total")},
            width=8,
        ),
        Panel(
            title="Throttled",
            description="Share of the periods in which a container was stopped because it had used up its processor "
            "limit. Tokens then come in bursts, and leases are renewed late: raise the limit, or remove "
            "it.",
            unit="percentunit",
            queries={OF_ONE: f"{THROTTLED} / ({PERIODS} > 0)"},
            width=8,
            bad_above=0.1,
        ),
        Panel(
            title="Processor, of the limit",
            description="A container's processor time as a share of its limit. Containers without a limit are not "
            "shown.",
            unit="percentunit",
            queries={OF_ONE: f"{per_container('container_cpu_usage_seconds_total')} / {limit('cpu')}"},
            width=8,
            bad_above=0.9,
        ),
        Panel(
            title="Memory",
            description="Memory of a container that cannot be reclaimed (working set). Endless growth is a leak: "
            "keep the log, and report it.",
            unit="bytes",
            queries={OF_ONE: MEMORY},
            width=8,
        ),
        Panel(
            title="Memory, of the limit",
            description="A container's memory as a share of its limit. At 100 % the kernel kills it (OOMKilled). "
            "Raise the limit, or lower engine.kv_cache_gib on CPUs.",
            unit="percentunit",
            queries={OF_ONE: f"{MEMORY} / {limit('memory')}"},
            width=8,
            bad_above=0.9,
        ),
        Panel(
            title="Network",
            description="Bytes per second of a pod, without RDMA, which bypasses the pod's network. Near the card's "
            "limit KV transfers are slow: see the exposed time.",
            unit="Bps",
            queries={
                f"{name} {{{{pod}}}}": NETWORK.format(way=way, pods=OF_POD)
                for way, name in (("transmit", "sent"), ("receive", "received"))
            },
            width=8,
            leads=(Lead("kv-transfer", "Exposed time"),),
        ),
    ),
)

ROUTERS = Section(
    "Routers' processes, also outside Kubernetes",
    (
        Panel(
            title="Processor of a router",
            description="Processors that a router uses. Near 1 it is at its limit, because one thread serves all "
            "requests: add routers.",
            unit="short",
            queries={"{{instance}}": "sum by (instance) (rate(process_cpu_seconds_total{$cluster}[$__rate_interval]))"},
            width=8,
            bad_above=0.95,
            leads=(Lead("prefix-cache", "Mirror lag"),),
        ),
        Panel(
            title="Memory of a router",
            description="Memory of a router. It grows with the requests in flight, and with the prefixes that "
            "workers hold.",
            unit="bytes",
            queries={"{{instance}}": "max by (instance) (process_resident_memory_bytes{$cluster})"},
            width=8,
        ),
        Panel(
            title="Files and connections of a router",
            description="Open files and connections of a router, and its limit. At the limit it accepts no "
            "connections: raise the limit (ulimit -n), or lower router.max_connections.",
            unit="short",
            queries={
                "{{instance}}": "max by (instance) (process_open_fds{$cluster})",
                "limit of {{instance}}": "max by (instance) (process_max_fds{$cluster})",
            },
            width=8,
            is_logarithmic=True,
        ),
        Panel(
            title="Age of a router",
            description="Time since a router started. If a router is young without a rollout, it has crashed: see "
            "the pods' restarts.",
            unit="s",
            queries={"{{instance}}": "time() - max by (instance) (process_start_time_seconds{$cluster})"},
            width=24,
            height=6,
            leads=(Lead("hardware", "Restarts"),),
        ),
    ),
)

PODS = Section(
    "Pods",
    (
        Panel(
            title="Restarts",
            description="Restarts of containers within the selected time range. `kubectl logs POD -c CONTAINER "
            "--previous` shows the end of the previous log. A worker that dies without its container "
            "counts as a failure of its pool.",
            unit="short",
            queries={
                OF_ONE: "sum by (pod, container) "
                f"(increase(kube_pod_container_status_restarts_total{{{OF_POD}}}[$__range]))"
            },
            kind=Kind.BARS,
            width=8,
            bad_above=1,
            leads=(Lead("pools", "Failures and unplaced workers"),),
        ),
        Panel(
            title="Last termination reasons",
            description="Reason for the last termination of each container. OOMKilled: its memory limit is too "
            "small; Error: its log says why; Completed: it was asked to stop.",
            unit="short",
            queries={
                "": "max by (pod, container, reason) "
                f"(kube_pod_container_status_last_terminated_reason{{{OF_POD}}}) == 1"
            },
            kind=Kind.TABLE,
            width=8,
        ),
        Panel(
            title="Waiting containers",
            description="Containers that are not running, by reason. ImagePullBackOff: the image's name or the pull "
            "secret is wrong; CrashLoopBackOff: the container exits again and again, and its log says "
            "why.",
            unit="short",
            queries={
                f"{OF_ONE} {{{{reason}}}}": "max by (pod, container, reason) "
                f"(kube_pod_container_status_waiting_reason{{{OF_POD}}}) or $zero"
            },
            width=8,
        ),
        Panel(
            title="Pods by phase",
            description="Pods of the release by phase. Pending for minutes: no node has the resources that they "
            "request; `kubectl describe pod POD` shows the missing resource.",
            unit="short",
            queries={"{{phase}}": f"sum by (phase) (max by (pod, phase) (kube_pod_status_phase{{{OF_POD}}}))"},
            width=12,
            is_stacked=True,
        ),
        Panel(
            title="Pods without a node",
            description="Pods for which the scheduler found no node. Add nodes, or reduce the pools' sizes.",
            unit="short",
            queries={"{{pod}}": f"max by (pod) (kube_pod_status_unschedulable{{{OF_POD}}}) or $zero"},
            width=12,
            leads=(Lead("pools", "Failures and unplaced workers"), Lead("autoscaling", "Utilisation")),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="hardware",
    title="Baton / Hardware",
    description="GPUs, containers and pods, as dcgm-exporter, cAdvisor and kube-state-metrics report them.",
    variables=(PREFIX, POD),
    sections=(SOURCES, GPUS, CONTAINERS, ROUTERS, PODS),
)
