"""Dashboard of the pools: number, states and load of the workers."""

from __future__ import annotations

from tools.dashboards.model import (
    EACH_WORKER,
    MODEL,
    OF_MODEL,
    RELEASE,
    ROLE,
    WORKER,
    Dashboard,
    Kind,
    Lead,
    Panel,
    Section,
)

OF_WORKER = f'{OF_MODEL}, role=~"$role", worker=~"$worker"'
STATES = f'max by (release, worker, role, state) (baton_worker_state{{$cluster, {OF_MODEL}, role=~"$role"}})'

SIZE = Section(
    "Size",
    (
        Panel(
            title="Ready and desired",
            description="Workers of each pool. If ready stays below desired for longer than a start takes, look at "
            "`baton status`, then at the logs of the controller and of the worker's pod. `baton scale "
            "POOL N` sets the desired size.",
            unit="short",
            queries={
                "{{release}} {{pool}} {{state}}": "max by (release, pool, state) "
                f"(baton_pool_workers{{$cluster, {OF_MODEL}}})"
            },
            leads=(
                Lead("pools", "Failures and unplaced workers"),
                Lead("autoscaling", "Utilisation"),
                Lead("hardware", "Pods without a node"),
            ),
        ),
        Panel(
            title="Workers by state",
            description="Workers by state. draining: the worker migrates its requests and leaves. Requests left "
            "after cluster.drain_timeout_s are recomputed elsewhere.",
            unit="short",
            queries={"{{role}} {{state}}": f"sum by (role, state) ({STATES})"},
            is_stacked=True,
        ),
        Panel(
            title="Takes traffic",
            description="Green while a worker accepts requests. If a worker flaps, its log says why; `baton drain "
            "WORKER` replaces it.",
            unit="short",
            queries={EACH_WORKER: f"max by (release, worker, role) (baton_worker_ready{{$cluster, {OF_WORKER}}})"},
            kind=Kind.STATES,
            bad_below=1,
            leads=(Lead("kv-transfer", "Failures by worker", "worker"), Lead("hardware", "Last termination reasons")),
        ),
        Panel(
            title="Workers",
            description="Properties that each worker reports. Two workers exchange KV only if their wire_compat is "
            "equal: during a rollout there are two values, afterwards one. A sampled response continues "
            "only on workers with the same sampler.",
            unit="short",
            queries={
                "": "max by (release, worker, role, node, engine, sampler, wire_compat, block_size) "
                f"(baton_worker_info{{$cluster, {OF_WORKER}}})"
            },
            kind=Kind.TABLE,
        ),
        Panel(
            title="Computing",
            description="Compute configuration of each worker: its GPU (empty: CPUs), data types, attention, CUDA "
            "graphs, fused modules, ranks, and the implementation of KV copies. Workers of one pool that "
            "differ are not equally fast.",
            unit="short",
            queries={
                "": "max by (release, worker, role, gpu, dtype, weights, kv_dtype, attention, graphs, fused, ranks, "
                f"kv_copies, plans_ahead) (baton_worker_computes{{$cluster, {OF_WORKER}}})"
            },
            kind=Kind.TABLE,
        ),
    ),
)

LOAD = Section(
    "Load",
    (
        Panel(
            title="Running sequences",
            description="Sequences in a worker's batch. Uneven among decode workers: some are new, or hold prefixes "
            "that others pull. Even and at engine.max_num_seqs: the pool is full.",
            unit="short",
            queries={
                EACH_WORKER: f"max by (release, worker, role) ("
                f'baton_worker_sequences{{$cluster, state="running", {OF_WORKER}}})'
            },
            leads=(Lead("autoscaling", "Placements by decode worker"), Lead("hardware", "GPU in use")),
        ),
        Panel(
            title="Waiting sequences",
            description="Sequences that wait for blocks or for their KV. Growing on prefill workers: prompts arrive "
            "faster than they are computed. Growing on decode workers: KV does not arrive, or there are "
            "no free blocks for it.",
            unit="short",
            queries={
                EACH_WORKER: f"max by (release, worker, role) ("
                f'baton_worker_sequences{{$cluster, state="waiting", {OF_WORKER}}})'
            },
            leads=(Lead("autoscaling", "Utilisation"), Lead("kv-transfer", "Computed but not sent", "worker")),
        ),
        Panel(
            title="KV in use",
            description="Share of a worker's blocks that sequences hold. Cached blocks do not count, as they can be "
            "reused immediately. Above 90 %, sequences wait or are preempted: add workers, raise "
            "engine.kv_cache_gib, or lower engine.output_reservation.",
            unit="percentunit",
            queries={
                EACH_WORKER: "max by (release, worker, role) (baton_kv_blocks{$cluster, "
                f'state="in_use", {OF_WORKER}}}) / sum by (release, worker, role) '
                f"(max by (release, worker, role, state) (baton_kv_blocks{{$cluster, {OF_WORKER}}}))"
            },
            bad_above=0.9,
            leads=(Lead("pools", "Preemptions", "worker"), Lead("prefix-cache", "Cached blocks")),
        ),
        Panel(
            title="Drafts",
            description="Speculated tokens per second that were checked together with the next ones, and those that "
            "were accepted: each saves its response a step. Text that does not repeat itself has none.",
            unit="short",
            queries={
                f"{name} ({{{{kind}}}})": "sum by (kind) (max by (release, worker, kind) "
                f"(rate(baton_{name}_tokens_total{{$cluster, {OF_WORKER}}}[$__rate_interval])))"
                for name in ("drafted", "accepted")
            },
        ),
        Panel(
            title="KV blocks by state",
            description="KV blocks; free + cached + in_use is the size of the pools. If no cached blocks are left, "
            "the next turn of a conversation finds no prefix.",
            unit="short",
            queries={
                "{{role}} {{state}}": "sum by (role, state) (max by (release, worker, role, state) "
                f"(baton_kv_blocks{{$cluster, {OF_WORKER}}}))"
            },
            is_stacked=True,
        ),
        Panel(
            title="State rows by state",
            description="Rows of recurrent layers' states: running sequences have rows in use; a cached row is a "
            "snapshot. If no snapshots are left, the next turn of a conversation is computed from the start. Empty: "
            "the model has no states.",
            unit="short",
            queries={
                "{{role}} {{state}}": "sum by (role, state) (max by (release, worker, role, state) "
                f"(baton_state_rows{{$cluster, {OF_WORKER}}}))"
            },
            is_stacked=True,
        ),
        Panel(
            title="LoRA adapters",
            description="Registered adapters, and those in the memory of each worker. A worker that always holds as "
            "many as engine.max_adapters allows may load adapters again and again: raise the setting, or add workers.",
            unit="short",
            queries={
                "registered for {{release}}": f"max by (release) (baton_adapters_registered{{$cluster, {OF_MODEL}}})",
                EACH_WORKER: f"max by (release, worker, role) (baton_adapters_resident{{$cluster, {OF_WORKER}}})",
            },
        ),
        Panel(
            title="Busiest expert",
            description="Tokens of the busiest expert of a worker, divided by the mean of all its experts, if ranks "
            "have whole experts (engine.expert_parallel). Far above 1: one rank computes while the others wait.",
            unit="short",
            queries={
                EACH_WORKER: "max by (release, worker, role) (rate(baton_expert_tokens_total"
                f"{{$cluster, {OF_WORKER}}}[$__rate_interval])) / avg by (release, worker, role) "
                f"(rate(baton_expert_tokens_total{{$cluster, {OF_WORKER}}}[$__rate_interval]))"
            },
        ),
    ),
)

TROUBLE = Section(
    "Faults",
    (
        Panel(
            title="Failures and unplaced workers",
            description="Failures: how often in 10 minutes workers of a pool died or could not start. Unplaced: "
            "workers that wait for a node with room. The controller logs the reason for each failure: "
            "`kubectl logs deployment/RELEASE-controller -c controller`.",
            unit="short",
            queries={
                "failures of {{release}} {{pool}}": "max by (release, pool) "
                f"(increase(baton_worker_failures_total{{$cluster, {OF_MODEL}}}[10m]))",
                "unplaced in {{release}} {{pool}}": "max by (release, pool) "
                f"(baton_unplaced_workers{{$cluster, {OF_MODEL}}})",
            },
            leads=(Lead("hardware", "Restarts"), Lead("hardware", "Pods without a node")),
        ),
        Panel(
            title="Preemptions",
            description="Sequences per second that lost their blocks and are recomputed. Responses are longer than "
            "engine.output_reservation, and the pool has no free blocks for the rest.",
            unit="ops",
            queries={
                EACH_WORKER: "max by (release, worker, role) (rate(baton_preemptions_total{$cluster, "
                f"{OF_WORKER}}}[$__rate_interval]))"
            },
            leads=(Lead("pools", "KV in use", "worker"),),
        ),
        Panel(
            title="Self-check",
            description="Red: a worker's integrity check fails, so blocks have leaked. Keep its log, then `baton "
            "drain WORKER`.",
            unit="short",
            queries={
                EACH_WORKER: f"min by (release, worker, role) (baton_worker_self_check_ok{{$cluster, {OF_WORKER}}})"
            },
            kind=Kind.STATES,
            bad_below=1,
        ),
        Panel(
            title="Slow implementations",
            description="Implementations that are slower than a worker's device allows, such as attention by torch, "
            "or no CUDA graphs. Above 0: `baton doctor` names each, with the reason.",
            unit="short",
            queries={EACH_WORKER: f"max by (release, worker, role) (baton_worker_fallbacks{{$cluster, {OF_WORKER}}})"},
            bad_above=1,
            leads=(Lead("pools", "Computing"),),
        ),
        Panel(
            title="Redis",
            description="Red: a router cannot reach Redis. Requests continue, but the router does not see new "
            "prefixes and workers. `baton doctor` shows the fault.",
            unit="short",
            queries={"{{instance}}": "min by (instance) (baton_redis_up{$cluster})"},
            kind=Kind.STATES,
            bad_below=1,
            leads=(Lead("prefix-cache", "Mirror lag"), Lead("pools", "Memory of Redis")),
        ),
        Panel(
            title="Controller",
            description="Red: a router knows of no controller of a model. Requests continue, but no worker is "
            "started, replaced or scaled. `kubectl logs deployment/RELEASE-controller -c controller`.",
            unit="short",
            queries={
                "{{release}}, {{instance}}": f"min by (release, instance) (baton_controller_up{{$cluster, {OF_MODEL}}})"
            },
            kind=Kind.STATES,
            bad_below=1,
        ),
        Panel(
            title="Memory of Redis",
            description="Memory that Redis uses, its limit if it has one, and the number of evicted keys. At the "
            "limit workers cannot renew their leases: raise redis.maxmemory. If keys are evicted, set "
            "maxmemory-policy to noeviction.",
            unit="bytes",
            queries={
                "{{kind}}": "max by (kind) (baton_redis_memory_bytes{$cluster})",
                "evicted keys": "max(baton_redis_evicted_keys_total{$cluster})",
            },
        ),
        Panel(
            title="Certificates",
            description="Time until a certificate expires, as the routers have it. Once it has expired, members "
            "refuse each other, and clients refuse the routers. Processes reread the files when they "
            "change. Without TLS the panel is empty.",
            unit="s",
            queries={
                "{{certificate}}": "min by (certificate) "
                '(baton_certificate_validity_seconds{$cluster, end="ends"}) - time()'
            },
            bad_below=259200,
        ),
        Panel(
            title="Unreadable values in Redis",
            description="Values per second that a router could not parse, by kind: written by another release, or by "
            "another program. Each affects only the object that it describes; `baton status` shows its "
            "key.",
            unit="ops",
            queries={"{{what}}": "sum by (what) (rate(baton_store_garbage_total{$cluster}[$__rate_interval]))"},
        ),
        Panel(
            title="Malformed messages",
            description="gRPC messages per second that are not valid protobuf, by the process that received them: "
            "from a broken client, or from a probe. Only members should connect to workers and the "
            "controller.",
            unit="ops",
            queries={
                "routers": "sum(rate(baton_malformed_messages_total{$cluster}[$__rate_interval]))",
                "{{worker}} of {{release}}": "max by (release, worker) "
                "(rate(baton_member_malformed_messages_total{$cluster}[$__rate_interval]))",
            },
        ),
        Panel(
            title="Versions",
            description="Routers by version. During a rollout there are two.",
            unit="short",
            queries={"": "count by (version) (baton_build_info{$cluster})"},
            kind=Kind.TABLE,
        ),
    ),
)

DASHBOARD = Dashboard(
    name="pools",
    title="Baton / Pools",
    description="Number, states and load of the workers.",
    variables=(MODEL, RELEASE, ROLE, WORKER),
    sections=(SIZE, LOAD, TROUBLE),
)
