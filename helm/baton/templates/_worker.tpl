{{/* A worker's pod: a Ray node with room for one worker that begins in that pool, or, for the group `worker`, for several
     workers of either. The controller places them there. (list group root) */}}
{{- define "baton.workerTemplate" -}}
{{- $role := index . 0 }}
{{- $root := index . 1 }}
{{- $pool := include "baton.pool" . | fromYaml }}
{{- $kuberay := eq $root.Values.orchestrator "kuberay" }}
{{- $isShared := eq $role "worker" }}
{{- $image := include "baton.workerImage" . | fromYaml }}
{{- $labels := $isShared | ternary (dict) (dict "baton.dev/pool" $role) }}
{{- $labels = merge $labels $pool.podLabels }}
{{- $resources := include "baton.withDisk" (list (include "baton.workerResources" $pool | fromYaml) "weights" $root) | fromYaml }}
{{- $securityContext := include "baton.workerSecurityContext" (list $pool $root) | fromYaml }}
metadata:
  labels:
    {{- include "baton.podLabels" (list $role $labels $root) | nindent 4 }}
  annotations:
    checksum/config: {{ include "baton.workerConfigChecksum" . }}
    {{- if $kuberay }}
    ray.io/overwrite-container-cmd: "true" # KubeRay's own command is in KUBERAY_GEN_RAY_START_CMD
    {{- end }}
    {{- include "baton.podAnnotations" $pool | nindent 4 }}
spec:
  {{- include "baton.podCommon" (list (include "baton.account" (list "" $root)) false $root) | nindent 2 }}
  {{- include "baton.scheduling" (list $pool $role $root) | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "baton.workerGrace" . }}
  {{- with $pool.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  initContainers:
    {{- include "baton.initContainers" (dict
        "part" "worker"
        "members" (dict "keys" "worker" "operator-keys" "operator")
        "image" $image
        "env" (include "baton.workerEnv" $root)
        "mounts" (include "baton.rayMounts" $root)
        "resources" $resources
        "securityContext" $securityContext
        "values" $pool
        "root" $root) | nindent 4 }}
  containers:
    - name: worker
      image: {{ include "baton.image" (list $image $root) | quote }}
      imagePullPolicy: {{ $image.pullPolicy }}
      command:
        {{- include "baton.nodeProcess" $root | nindent 8 }}
        {{- if $kuberay }}
        - sh
        - -c
        - ulimit -n 65536; eval "exec $KUBERAY_GEN_RAY_START_CMD"
        {{- else }}
        {{- include "baton.nodeCommand" (list (include "baton.podGpus" $pool) $root) | nindent 8 }}
        - --include-log-monitor=false # no worker's output is in Ray's files
        - '--resources={"baton_worker": {{ $pool.perPod | int }}}'
        {{- if not $isShared }}
        - --labels=baton.dev/pool={{ $role }}
        {{- end }}
      {{- end }}
      env:
        {{- include "baton.workerEnv" $root | nindent 8 }}
        {{- with $pool.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- include "baton.envFrom" $pool | nindent 6 }}
      ports: # with the machine's network it keeps a second Ray node from that machine
        - name: raylet
          containerPort: 6380
      {{- include "baton.workerProbes" $root | nindent 6 }}
      lifecycle:
        preStop:
          exec:
            # Who orders workers to leave is an operator.
            command: [env, BATON_CLUSTER_SECRET=/run/baton-operator-keys/keys, baton, leave, --config, /etc/baton/baton.yaml, --timeout, {{ include "baton.leaveSeconds" $root | quote }}]
      resources:
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- toYaml $securityContext | nindent 8 }}
      volumeMounts:
        {{- include "baton.rayMounts" $root | nindent 8 }}
        {{- include "baton.keysMount" $root | nindent 8 }}
        - name: operator-keys
          mountPath: /run/baton-operator-keys
          readOnly: true
        {{- with $pool.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $pool.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "baton.rayVolumes" (list $pool.sharedMemory $root) | nindent 4 }}
    {{- include "baton.modelVolume" (dict "weights" true "root" $root) | nindent 4 }}
    {{- include "baton.keysVolumes" (list (list "keys" "operator-keys") $root) | nindent 4 }}
    {{- with $pool.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "baton.podGpus" -}}
{{ mul .gpu.count .perPod }}
{{- end }}

{{/* With the pod's GPUs and RDMA devices. Kubernetes takes the limit of a device as its request. */}}
{{- define "baton.workerResources" -}}
{{- $devices := dict }}
{{- if and .gpu.count .gpu.resource }}
{{- $_ := set $devices .gpu.resource (include "baton.podGpus" . | int) }}
{{- end }}
{{- if .rdma.enabled }}
{{- $_ := set $devices .rdma.resource (.rdma.count | int) }}
{{- end }}
{{- $claims := list }}
{{- range .resourceClaims }}
{{- $claims = append $claims (dict "name" .name) }}
{{- end }}
{{- $resources := mergeOverwrite (deepCopy .resources) (dict "limits" $devices) }}
{{- if $claims }}
{{- $_ := set $resources "claims" $claims }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* RDMA pins memory. Linux gives an added capability effect for root alone; others need the runtime's memlock limit. */}}
{{- define "baton.workerSecurityContext" -}}
{{- $pool := index . 0 }}
{{- $context := deepCopy (index . 1).Values.containerSecurityContext }}
{{- if and $pool.rdma.enabled $pool.rdma.asRoot }}
{{- $lock := dict "capabilities" (dict "add" (list "IPC_LOCK")) }}
{{- $context = mergeOverwrite $context $lock (dict "runAsUser" 0 "runAsNonRoot" false) }}
{{- end }}
{{- toYaml $context }}
{{- end }}

{{/* A Ray node; `ray start --block` ends when its raylet does. (list GPUs root) */}}
{{- define "baton.nodeCommand" -}}
- ray
- start
- --block
- --address={{ include "baton.headHost" (index . 1) }}:6379
- --node-ip-address=$(POD_IP)
- --num-cpus=0
- --num-gpus={{ index . 0 }}
- --object-store-memory=100000000
- --temp-dir=/tmp/ray
{{- range $name, $port := include "baton.rayPorts" . | fromYaml }}
- --{{ $name }}={{ $port | int }}
{{- end }}
- --disable-usage-stats
{{- end }}

{{/* The node process, the first process of a worker's container. It runs the workers and Ray, and restarts Ray if that fails
     while workers serve on. It copies their output to `kubectl logs`. */}}
{{- define "baton.nodeProcess" -}}
- python
- -P
- -m
- deploy.ray_pools.node
- --folder=/var/tmp/node
- --raylet=$(POD_IP):6380
- --log-format={{ dig "telemetry" "log_format" "text" .Values.config }}
- --
{{- end }}

{{/* A question to the raylet itself, which answers gRPC's health checks. With Ray's own TLS the kubelet can only connect.
     (extraEnv) */}}
{{- define "baton.rayletProbe" -}}
{{- $kind := "grpc" }}
{{- range . }}
{{- if eq .name "RAY_USE_TLS" }}
{{- $kind = "tcpSocket" }}
{{- end }}
{{- end }}
{{- $kind }}: {port: 6380}
{{- end }}

{{/* Of a Ray node without workers. (extraEnv) */}}
{{- define "baton.nodeProbes" -}}
startupProbe:
  {{ include "baton.rayletProbe" . }}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 90
readinessProbe:
  {{ include "baton.rayletProbe" . }}
  periodSeconds: 5
  timeoutSeconds: 3
livenessProbe:
  {{ include "baton.rayletProbe" . }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* Started: a worker here has loaded its model, or none has come for a minute. Ready: every worker here takes traffic,
     and there is one; the event of a failure says what they do. Alive: the node process has touched its file within a
     minute. The kubelet does not check the raylet, because it would end workers that serve on without it. The node process
     checks it. */}}
{{- define "baton.workerProbes" -}}
startupProbe:
  exec: {command: [sh, -c, cat /var/tmp/node/workers; test -e /var/tmp/node/started]}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: {{ div (add (ceil .Values.config.cluster.start_timeout_s | int) 120) 2 }}
readinessProbe:
  exec: {command: [sh, -c, cat /var/tmp/node/workers; test -e /var/tmp/node/ready]}
  periodSeconds: 3
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  exec: {command: [sh, -c, find /var/tmp/node -name alive -mmin -1 | grep -q .]}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* Ports of a Ray node, all below those that the kernel gives away, so that policies can tell a worker's from them. */}}
{{- define "baton.rayPorts" -}}
node-manager-port: 6380
object-manager-port: 6381
runtime-env-agent-port: 6382
metrics-export-port: 6383
dashboard-agent-listen-port: 6384
dashboard-agent-grpc-port: 6385
min-worker-port: 10002
max-worker-port: 19999
{{- end }}
