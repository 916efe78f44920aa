{{/* Names */}}

{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* 45 characters, so that the longest suffix still fits into 63. */}}
{{- define "baton.fullname" -}}
{{- include "baton.validateAge" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" }}
{{- else if contains (include "baton.name" .) .Release.Name -}}
{{- .Release.Name | trunc 45 | trimSuffix "-" }}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "baton.name" .) | trunc 45 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The release with the routers and Redis, which is this one unless parts.door is false. */}}
{{- define "baton.doorFullname" -}}
{{- if .Values.parts.door -}}
{{ include "baton.fullname" . }}
{{- else if .Values.door.fullname -}}
{{ .Values.door.fullname }}
{{- else if contains (include "baton.name" .) .Values.door.release -}}
{{ .Values.door.release | trunc 45 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Values.door.release (include "baton.name" .) | trunc 45 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "baton.doorRelease" -}}
{{ .Values.parts.door | ternary .Release.Name .Values.door.release }}
{{- end }}

{{- define "baton.doorNamespace" -}}
{{ .Values.parts.door | ternary "" .Values.door.namespace | default .Release.Namespace }}
{{- end }}

{{/* The routers. */}}
{{- define "baton.host" -}}
{{ include "baton.doorFullname" . }}.{{ include "baton.doorNamespace" . }}.svc
{{- end }}

{{/* The name under which clients request the model. */}}
{{- define "baton.servedName" -}}
{{ .Values.config.model.served_name | default (.Values.config.model.id | trimSuffix "/" | splitList "/" | last) }}
{{- end }}

{{/* The name of this release of the model, in metrics too. */}}
{{- define "baton.modelRelease" -}}
{{ .Values.config.model.release | default .Release.Name }}
{{- end }}

{{/* Whether the routers serve the model of this release's configuration from the start. */}}
{{- define "baton.ownModel" -}}
{{- if and .Values.parts.model (dig "router" "own_model" true .Values.config) -}}
yes
{{- end }}
{{- end }}

{{/* Where processes listen: at every address of their pod. `::` takes IPv4 as well, if the pod's kernel has IPv6. */}}
{{- define "baton.listenHost" -}}
{{ eq .Values.ipFamily "IPv4" | ternary "0.0.0.0" "::" }}
{{- end }}

{{- define "baton.headHost" -}}
{{ include "baton.fullname" . }}-head.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "baton.rayStoreHost" -}}
{{ include "baton.fullname" . }}-ray-store.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "baton.redisHost" -}}
{{ include "baton.doorFullname" . }}-redis.{{ include "baton.doorNamespace" . }}.svc
{{- end }}

{{- define "baton.redisSecretName" -}}
{{ .Values.redis.passwords.existingSecret | default (printf "%s-redis" (include "baton.doorFullname" .)) }}
{{- end }}

{{- define "baton.rayStoreSecretName" -}}
{{ .Values.ray.store.password.existingSecret | default (printf "%s-ray-store" (include "baton.fullname" .)) }}
{{- end }}

{{- define "baton.clusterSecretName" -}}
{{ .Values.clusterSecret.existingSecret | default (printf "%s-cluster" (include "baton.doorFullname" .)) }}
{{- end }}

{{- define "baton.cacheSecretName" -}}
{{ .Values.router.cacheSecret.existingSecret | default (printf "%s-router" (include "baton.fullname" .)) }}
{{- end }}

{{- define "baton.raySecretName" -}}
{{ .Values.ray.token.existingSecret | default (printf "%s-ray" (include "baton.fullname" .)) }}
{{- end }}

{{- define "baton.tenantsSecretName" -}}
{{- if .Values.router.tenants.existingSecret -}}
{{ .Values.router.tenants.existingSecret }}
{{- else if .Values.router.tenants.inline -}}
{{ include "baton.fullname" . }}-tenants
{{- end }}
{{- end }}

{{/* The ServingPool of a pool. (list role root) */}}
{{- define "baton.poolName" -}}
{{- $root := index . 1 }}
{{- (get $root.Values.pools (index . 0)).name | default (printf "%s-%s" (include "baton.fullname" $root) (index . 0)) }}
{{- end }}

{{/* repository@digest or repository:tag. A registry of the values' stands in place of docker.io, and before names without a
     host, which docker knows by a dot, a colon or `localhost`. (list image root) */}}
{{- define "baton.image" -}}
{{- $image := index . 0 }}
{{- $root := index . 1 }}
{{- $repository := $image.repository }}
{{- with $root.Values.image.registry }}
{{- $repository = trimPrefix "docker.io/" $repository }}
{{- if not (regexMatch "^([^/]*[.:][^/]*|localhost)/" $repository) }}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository }}
{{- end }}
{{- end }}
{{- if $image.digest -}}
{{ $repository }}@{{ $image.digest }}
{{- else -}}
{{ $repository }}:{{ $image.tag | default $root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* The service account of a component: controller, head, or empty for all others. (list component root) */}}
{{- define "baton.account" -}}
{{- $accounts := (index . 1).Values.serviceAccount }}
{{- $full := include "baton.fullname" (index . 1) }}
{{- if eq (index . 0) "controller" -}}
{{ $accounts.existingController | default (printf "%s-controller" $full) }}
{{- else if eq (index . 0) "head" -}}
{{ $accounts.existingHead | default (printf "%s-head" $full) }}
{{- else -}}
{{ $accounts.existing | default $full }}
{{- end }}
{{- end }}

{{/* Labels. (list component root) */}}

{{- define "baton.releaseSelector" -}}
app.kubernetes.io/name: {{ include "baton.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "baton.selector" -}}
{{ include "baton.releaseSelector" (index . 1) }}
app.kubernetes.io/component: {{ index . 0 }}
{{- end }}

{{- define "baton.labels" -}}
{{- include "baton.labelsWith" (list (index . 0) (dict) (index . 1)) }}
{{- end }}

{{/* With others of one object alone, each name once. (list component labels root) */}}
{{- define "baton.labelsWith" -}}
{{- $root := index . 2 -}}
{{ include "baton.selector" (list (index . 0) $root) }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | quote }}
{{- with merge (dict) (index . 1) $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of a pod: nothing that changes with the chart's version, or every upgrade would restart every pod.
     (list component labels root) */}}
{{- define "baton.podLabels" -}}
{{- $root := index . 2 -}}
{{ include "baton.selector" (list (index . 0) $root) }}
{{- with merge (dict) (include "baton.doorLabels" $root | fromYaml) (index . 1) $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* By which the policies of the release with the routers admit the pods of other releases. */}}
{{- define "baton.doorLabels" -}}
{{- if not .Values.parts.door -}}
baton.dev/door: {{ .Values.door.release | quote }}
baton.dev/door-namespace: {{ include "baton.doorNamespace" . | quote }}
{{- end }}
{{- end }}

{{/* The user's, and the marks by which autoscalers of nodes leave a pod where it is. (a part's values) */}}
{{- define "baton.podAnnotations" -}}
{{- with .podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- if .doNotEvict }}
cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
karpenter.sh/do-not-disrupt: "true"
{{- end }}
{{- end }}

{{/* The kinds of worker pods: one for each pool, or `worker`, whose pods have room for several workers of both pools. */}}
{{- define "baton.workerGroups" -}}
{{ gt (.Values.worker.perPod | int) 1 | ternary "worker" "prefill decode" }}
{{- end }}

{{/* Whether a worker leaves before the one in its place begins. A pod of several workers is a machine's: there may be no
     other one for a pod in its place. */}}
{{- define "baton.inPlace" -}}
{{- if or (eq .Values.worker.updateStrategy "inPlace") (gt (.Values.worker.perPod | int) 1) }}yes{{ end }}
{{- end }}

{{/* A pool's values: its own, and those of `worker` for what it does not say. The group `worker` has those alone.
     (list group root) */}}
{{- define "baton.pool" -}}
{{- $root := index . 1 }}
{{- $own := get $root.Values.pools (index . 0) | default dict }}
{{- toYaml (mergeOverwrite (deepCopy $root.Values.worker) (deepCopy $own)) }}
{{- end }}

{{/* The image of a group's workers: a pool may have its own. (list group root) */}}
{{- define "baton.workerImage" -}}
{{- $root := index . 1 }}
{{- $own := (get $root.Values.pools (index . 0) | default dict).image | default dict }}
{{- $image := deepCopy $root.Values.image.worker }}
{{- if and $own.tag (not $own.digest) }}
{{- $_ := set $image "digest" "" }}
{{- end }}
{{- toYaml (mergeOverwrite $image (deepCopy $own)) }}
{{- end }}

{{/* Settings of `engine` of a pool's workers: those of both pools, and its own. The group `worker` has those of both pools.
     (list group root) */}}
{{- define "baton.poolEngine" -}}
{{- $root := index . 1 }}
{{- $common := $root.Values.config.engine | default dict }}
{{- if eq (index . 0) "worker" }}
{{- toJson (dict "common" $common "prefill" $root.Values.pools.prefill.engine "decode" $root.Values.pools.decode.engine) }}
{{- else }}
{{- toJson (mergeOverwrite (deepCopy $common) (deepCopy ((get $root.Values.pools (index . 0)).engine | default dict))) }}
{{- end }}
{{- end }}

{{/* Whether the GPUs of a worker differ between the pools. */}}
{{- define "baton.gpusDiffer" -}}
{{- $counts := list }}
{{- range $role := list "prefill" "decode" }}
{{- $counts = append $counts ((include "baton.pool" (list $role $) | fromYaml).gpu.count | int) }}
{{- end }}
{{- if ne (first $counts) (last $counts) }}yes{{ end }}
{{- end }}

{{/* Section `pools` of the settings, as JSON: what differs between the pools. */}}
{{- define "baton.poolsConfig" -}}
{{- $pools := dict }}
{{- range $role := list "prefill" "decode" }}
{{- $engine := deepCopy ((get $.Values.pools $role).engine | default dict) }}
{{- $own := dict }}
{{- if include "baton.gpusDiffer" $ }}
{{- $gpus := (include "baton.pool" (list $role $) | fromYaml).gpu.count | int }}
{{- $_ := set $engine "tensor_parallel" $gpus }}
{{- $_ := set $own "gpus_per_worker" $gpus }}
{{- end }}
{{- if $engine }}
{{- $_ := set $own "engine" $engine }}
{{- end }}
{{- if $own }}
{{- $_ := set $pools $role $own }}
{{- end }}
{{- end }}
{{- toJson $pools }}
{{- end }}

{{/* The disruption budget of a pool's pods, which may be that of both pools; empty: it has none. (list role root) */}}
{{- define "baton.poolBudget" -}}
{{- $root := index . 1 }}
{{- $pools := $root.Values.pools }}
{{- if gt (int $root.Values.worker.perPod) 1 }}
{{- if or $pools.prefill.podDisruptionBudget.enabled $pools.decode.podDisruptionBudget.enabled }}
{{- include "baton.fullname" $root }}-worker
{{- end }}
{{- else if (get $pools (index . 0)).podDisruptionBudget.enabled }}
{{- include "baton.fullname" $root }}-{{ index . 0 }}
{{- end }}
{{- end }}

{{/* How many workers may be there in addition, and may be missing, during a roll-out; as in a Deployment. */}}
{{- define "baton.rollout" -}}
{{- $unavailable := .Values.worker.maxUnavailable }}
{{- if include "baton.inPlace" . }}
{{- if has (toString $unavailable) (list "0" "0%") }}
{{- $unavailable = 1 }}
{{- end }}
{{- toJson (dict "maxSurge" 0 "maxUnavailable" $unavailable) }}
{{- else }}
{{- toJson (dict "maxSurge" .Values.worker.maxSurge "maxUnavailable" $unavailable) }}
{{- end }}
{{- end }}

{{/* Pods of the group `worker` that have room for so many workers. (list workers root) */}}
{{- define "baton.podsFor" -}}
{{- $perPod := (index . 1).Values.worker.perPod | int }}
{{- div (add (index . 0) $perPod -1) $perPod }}
{{- end }}

{{/* Times */}}

{{- define "baton.drainSeconds" -}}
{{ ceil .Values.config.cluster.drain_timeout_s | int }}
{{- end }}

{{/* A worker's pod leaves when its work is transferred and the worker that replaces it serves. */}}
{{- define "baton.leaveSeconds" -}}
{{ add (include "baton.drainSeconds" . | int) (ceil .Values.config.cluster.start_timeout_s | int) }}
{{- end }}

{{/* (list role root) */}}
{{- define "baton.workerGrace" -}}
{{- $root := index . 1 }}
{{- $pool := include "baton.pool" . | fromYaml }}
{{- $least := add (include "baton.leaveSeconds" $root | int) 30 | int }}
{{- $grace := $pool.terminationGracePeriodSeconds | int }}
{{- if and $grace (lt $grace $least) }}
{{- fail (printf "worker.terminationGracePeriodSeconds (%d) is too short for pool %s: draining (config.cluster.drain_timeout_s) and the start of the worker that replaces it (config.cluster.start_timeout_s) may take %s s; set at least %d, or 0 to have it computed" $grace (index . 0) (include "baton.leaveSeconds" $root) $least) }}
{{- end }}
{{- $grace | default $least }}
{{- end }}

{{/* As long as a worker may take to start, with its image and its place on a node. (list role root) */}}
{{- define "baton.progressDeadline" -}}
{{- $root := index . 1 }}
{{- $pool := include "baton.pool" . | fromYaml }}
{{- $least := add (ceil $root.Values.config.cluster.start_timeout_s | int) 600 | int }}
{{- $deadline := $pool.progressDeadlineSeconds | int }}
{{- if and $deadline (lt $deadline $least) }}
{{- fail (printf "worker.progressDeadlineSeconds (%d) is too short for pool %s: a worker may take config.cluster.start_timeout_s to start, and its pod 600 s before that, so helm and kubectl would report a good rollout as failed; set at least %d, or 0 to have it computed" $deadline (index . 0) $least) }}
{{- end }}
{{- $deadline | default $least }}
{{- end }}

{{- define "baton.routerGrace" -}}
{{- $grace := .Values.router.terminationGracePeriodSeconds | int }}
{{- $least := add (.Values.router.preStopSeconds | int) (ceil .Values.config.router.drain_timeout_s | int) 10 | int }}
{{- if and $grace (lt $grace $least) }}
{{- fail (printf "router.terminationGracePeriodSeconds (%d) is too short: router.preStopSeconds and config.router.drain_timeout_s need %d; 0 has it computed" $grace $least) }}
{{- end }}
{{- $grace | default $least }}
{{- end }}

{{/* Upgrades with --reuse-values have the values of the chart before, without what is new in this one. Every template asks
     for the name first, so this sentence comes before what a missing value would say. */}}
{{- define "baton.validateAge" -}}
{{- if not (and (hasKey .Values "crds") (hasKey .Values "secrets") (hasKey .Values "parts")) }}
{{- fail "these values are those of an older chart, and lack what is new in this one: upgrade with --reset-then-reuse-values in place of --reuse-values, or with --values" }}
{{- end }}
{{- end }}

{{/* What the values together cannot mean. The schema refuses what one value alone cannot. */}}
{{- define "baton.validate" -}}
{{- $values := .Values }}
{{- include "baton.validateParts" . }}
{{- if and $values.redis.enabled (or $values.redis.external.url $values.redis.external.existingSecret) }}
{{- fail "redis.external is set, but redis.enabled is true: set redis.enabled=false to use your own Redis" }}
{{- end }}
{{- if not (or $values.redis.enabled $values.redis.external.url $values.redis.external.existingSecret) }}
{{- fail "redis.enabled is false: set redis.external.url, or redis.external.existingSecret for a URL with a password" }}
{{- end }}
{{- if and $values.redis.external.url $values.redis.external.existingSecret }}
{{- fail "set redis.external.url or redis.external.existingSecret, not both" }}
{{- end }}
{{- range $name, $value := dict "passwords.existingSecret" $values.redis.passwords.existingSecret "tls" $values.redis.tls "persistence.enabled" $values.redis.persistence.enabled }}
{{- if and $value (not $values.redis.enabled) }}
{{- fail (printf "redis.%s is set, but redis.enabled is false: it is for the chart's own Redis; put the password of yours into the URL in redis.external.existingSecret" $name) }}
{{- end }}
{{- end }}
{{- if contains "@" $values.redis.external.url }}
{{- fail "redis.external.url holds a password: put the URL into a Secret, and name it in redis.external.existingSecret" }}
{{- end }}
{{- if and $values.router.tenants.existingSecret $values.router.tenants.inline }}
{{- fail "set router.tenants.existingSecret or router.tenants.inline, not both" }}
{{- end }}
{{- include "baton.validateNetwork" . }}
{{- include "baton.validateLabels" . }}
{{- if $values.parts.model }}
{{- include "baton.validateModel" . }}
{{- include "baton.validateDevices" . }}
{{- include "baton.validatePools" . }}
{{- end }}
{{- if and $values.ingress.enabled (not $values.ingress.host) (not $values.ingress.grpcHost) }}
{{- fail "ingress.enabled needs ingress.host or ingress.grpcHost" }}
{{- end }}
{{- if and (ne $values.tls.clientCertificates "off") (not (include "baton.tlsSecretName" $)) }}
{{- fail (printf "tls.clientCertificates is %s, which needs tls.issuer.name or tls.existingSecret" $values.tls.clientCertificates) }}
{{- end }}
{{- if and $values.redis.tls (not (include "baton.tlsSecretName" $)) }}
{{- fail "redis.tls is true, which needs tls.issuer.name or tls.existingSecret" }}
{{- end }}
{{- if and $values.monitoring.serviceMonitor.enabled $values.monitoring.podMonitor.enabled }}
{{- fail "enable monitoring.serviceMonitor or monitoring.podMonitor, not both: every request would be counted twice" }}
{{- end }}
{{- if and $values.router.autoscaling.enabled (gt ($values.router.autoscaling.minReplicas | int) ($values.router.autoscaling.maxReplicas | int)) }}
{{- fail (printf "router.autoscaling.minReplicas (%v) exceeds router.autoscaling.maxReplicas (%v)" $values.router.autoscaling.minReplicas $values.router.autoscaling.maxReplicas) }}
{{- end }}
{{- if and $values.router.autoscaling.enabled $values.router.autoscaling.targetCPUUtilizationPercentage (not (dig "requests" "cpu" "" $values.router.resources)) }}
{{- fail "router.autoscaling.enabled needs router.resources.requests.cpu, of which it measures the use" }}
{{- end }}
{{- end }}

{{/* Whether a model without requests stops all of its workers. */}}
{{- define "baton.maySleep" -}}
{{- $autoscale := .Values.config.autoscale | default dict }}
{{- if and $autoscale.enabled (eq (dig "min_decode" 1 $autoscale | int) 0) -}}
yes
{{- end }}
{{- end }}

{{/* What release this is, and of which endpoint. */}}
{{- define "baton.validateParts" -}}
{{- $values := .Values }}
{{- if not (or $values.parts.door $values.parts.model) }}
{{- fail "parts.door and parts.model are both false, so the release would be empty: set parts.door for routers and Redis, parts.model for a model's workers, or both" }}
{{- end }}
{{- if $values.parts.door }}
{{- if or $values.door.release $values.door.namespace $values.door.fullname }}
{{- fail "door names another release with the routers, but parts.door is true: set parts.door=false for a release with a model only" }}
{{- end }}
{{- if and (not $values.parts.model) (dig "router" "own_model" false $values.config) }}
{{- fail "config.router.own_model is true, but parts.model is false: routers without a model of their own serve those that other releases announce; remove the setting, or set parts.model=true" }}
{{- end }}
{{- else }}
{{- if not $values.door.release }}
{{- fail "parts.door is false: set door.release to the Helm release with the routers and Redis, and door.namespace if that is in another namespace" }}
{{- end }}
{{- $isHere := eq (include "baton.doorNamespace" .) .Release.Namespace }}
{{- if and $isHere (eq $values.door.release .Release.Name) }}
{{- fail (printf "door.release is %q, which is this release: name the one with the routers, or set parts.door=true" .Release.Name) }}
{{- end }}
{{- if $isHere }}
{{- $full := include "baton.fullname" . }}
{{- $door := include "baton.doorFullname" . }}
{{- range $suffix := list "" "-router" "-controller" "-head" "-workers" "-prefill" "-decode" "-worker" "-redis" "-ray-store" "-names" "-test" "-mesh" "-outside" "-metrics" }}
{{- if or (eq $full (print $door $suffix)) (eq $door (print $full $suffix)) }}
{{- fail (printf "objects of this release would be named after %q, and those of release %s after %q, so some would have the same name: use another release name, or set fullnameOverride" $full $values.door.release $door) }}
{{- end }}
{{- end }}
{{- else }}
{{- $names := dict "clusterSecret.existingSecret" $values.clusterSecret.existingSecret }}
{{- if $values.redis.enabled }}
{{- $_ := set $names "redis.passwords.existingSecret" $values.redis.passwords.existingSecret }}
{{- end }}
{{- range $name, $value := $names }}
{{- if not $value }}
{{- $secret := eq $name "clusterSecret.existingSecret" | ternary (include "baton.clusterSecretName" $) (include "baton.redisSecretName" $) }}
{{- fail (printf "the routers are in namespace %s, whose Secrets pods of %s cannot read: copy Secret %s, and set %s to the name of the copy" $values.door.namespace $.Release.Namespace $secret $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.validatePools" -}}
{{- $values := .Values }}
{{- if and (not (include "baton.inPlace" .)) (has (toString $values.worker.maxSurge) (list "0" "0%")) }}
{{- fail "worker.maxSurge is 0, and worker.updateStrategy surge starts a new worker before an old one leaves: set worker.updateStrategy=inPlace, or a worker.maxSurge of at least 1" }}
{{- end }}
{{- $isEncrypted := or (include "baton.tlsSecretName" $) (dig "cluster" "tls_certificate" "" $values.config) }}
{{- if and $isEncrypted (not (has "nccl" (dig "transfer" "plaintext_transports" list $values.config))) }}
{{- range $role := list "prefill" "decode" }}
{{- if (include "baton.pool" (list $role $) | fromYaml).rdma.enabled }}
{{- fail (printf "the %s pool has RDMA devices, but KV would go over TCP: members have certificates, and NCCL cannot encrypt. Where nobody else is on the network between the GPUs, set config.transfer.plaintext_transports=[nccl]; else set worker.rdma.enabled=false" $role) }}
{{- end }}
{{- end }}
{{- end }}
{{- $name := include "baton.poolName" (list "decode" .) }}
{{- if eq $name (include "baton.poolName" (list "prefill" .)) }}
{{- fail (printf "pools.prefill.name and pools.decode.name are both %q" $name) }}
{{- end }}
{{- $autoscale := $values.config.autoscale | default dict }}
{{- $scalesItself := and $autoscale.enabled (not $autoscale.dry_run) }}
{{- $maySleep := include "baton.maySleep" . }}
{{- if $maySleep }}
{{- if dig "min_prefill" 1 $autoscale | int }}
{{- fail "config.autoscale.min_decode is 0, so that the model sleeps without workers: set config.autoscale.min_prefill=0 too" }}
{{- end }}
{{- if not $values.pools.decode.initialReplicas }}
{{- fail "config.autoscale.min_decode is 0, and so is pools.decode.initialReplicas: routers learn of a model from its first worker; set pools.decode.initialReplicas to at least 1, and the model sleeps after config.autoscale.idle_s" }}
{{- end }}
{{- if not $values.controller.persistence.enabled }}
{{- fail "config.autoscale.min_decode is 0: while the model sleeps, only the controller has the files that routers need of it, and its pod may be replaced; set controller.persistence.enabled=true" }}
{{- end }}
{{- end }}
{{- $gpus := dict }}
{{- range $role := list "prefill" "decode" }}
{{- $pool := include "baton.pool" (list $role $) | fromYaml }}
{{- if gt ($pool.minReplicas | int) ($pool.maxReplicas | int) }}
{{- fail (printf "pools.%s.minReplicas (%v) exceeds pools.%s.maxReplicas (%v)" $role $pool.minReplicas $role $pool.maxReplicas) }}
{{- end }}
{{- if or (lt ($pool.initialReplicas | int) ($pool.minReplicas | int)) (gt ($pool.initialReplicas | int) ($pool.maxReplicas | int)) }}
{{- fail (printf "pools.%s.initialReplicas (%v) is outside minReplicas (%v) and maxReplicas (%v)" $role $pool.initialReplicas $pool.minReplicas $pool.maxReplicas) }}
{{- end }}
{{- if and $pool.hpa.enabled $pool.keda.enabled }}
{{- fail (printf "enable pools.%s.hpa or pools.%s.keda, not both" $role $role) }}
{{- end }}
{{- if and (or $pool.hpa.enabled $pool.keda.enabled) $scalesItself }}
{{- fail (printf "pools.%s has an autoscaler, and Baton's own is on: set config.autoscale.dry_run=true, so that it only reports what it would do" $role) }}
{{- end }}
{{- if and (or (and $pool.hpa.enabled (not $pool.hpa.metrics)) (and $pool.keda.enabled (not $pool.keda.query))) (not $autoscale.enabled) }}
{{- fail (printf "the default metric of pools.%s's autoscaler is what Baton's own would do: set config.autoscale.enabled=true, config.autoscale.dry_run=true and config.autoscale.max_workers, or give a metric" $role) }}
{{- end }}
{{- if and $pool.keda.enabled (not $pool.keda.serverAddress) }}
{{- fail (printf "pools.%s.keda.enabled needs pools.%s.keda.serverAddress: the URL of Prometheus" $role $role) }}
{{- end }}
{{- if and $pool.keda.enabled (not $pool.keda.query) (ne (float64 $pool.keda.threshold) 1.0) }}
{{- fail (printf "pools.%s.keda.threshold is %v, and the default query counts workers: the pool would have 1/%v of the workers that it needs; set the threshold to 1, or give pools.%s.keda.query" $role $pool.keda.threshold $pool.keda.threshold $role) }}
{{- end }}
{{- if lt ($pool.minReplicas | int) 1 }}
{{- if $pool.hpa.enabled }}
{{- fail (printf "pools.%s has an HPA, so pools.%s.minReplicas must be at least 1: an HPA does not start the first worker of an empty pool; KEDA and Baton's own autoscaler do" $role $role) }}
{{- end }}
{{- if and $pool.keda.enabled (not $maySleep) }}
{{- fail (printf "pools.%s.keda is enabled and pools.%s.minReplicas is 0: routers hold requests for an empty pool only if the model may sleep; set config.autoscale.enabled=true, config.autoscale.min_prefill=0 and config.autoscale.min_decode=0, or a pools.%s.minReplicas of at least 1" $role $role $role) }}
{{- end }}
{{- else if and $maySleep (or $scalesItself $pool.keda.enabled) }}
{{- fail (printf "config.autoscale.min_decode is 0, so that the model sleeps without workers, and pools.%s.minReplicas is %v: set pools.prefill.minReplicas=0 and pools.decode.minReplicas=0" $role $pool.minReplicas) }}
{{- end }}
{{- $_ := set $gpus $role ($pool.gpu.count | int) }}
{{- include "baton.validateRanks" (list $role $) }}
{{- if and (gt ($values.worker.perPod | int) 1) (index $values.pools $role).image }}
{{- fail (printf "worker.perPod is %v, so both pools have the same pods: pools.%s.image has no effect; set image.worker" $values.worker.perPod $role) }}
{{- end }}
{{- if gt ($values.worker.perPod | int) 1 }}
{{- range $name, $_ := $values.worker }}
{{- if hasKey (index $values.pools $role) $name }}
{{- fail (printf "worker.perPod is %v, so both pools have the same pods: pools.%s.%s has no effect; set worker.%s" $values.worker.perPod $role $name $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (ne $gpus.prefill $gpus.decode) (not (and $gpus.prefill $gpus.decode)) }}
{{- fail (printf "pools.prefill.gpu.count is %d and pools.decode.gpu.count %d: the model of both pools is on GPUs, or on CPUs (config.model.device)" $gpus.prefill $gpus.decode) }}
{{- end }}
{{- end }}

{{/* Labels that the chart sets: selectors and policies are made of them. */}}
{{- define "baton.validateLabels" -}}
{{- $values := .Values }}
{{- $own := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/part-of" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart" "baton.dev/pool" "baton.dev/door" "baton.dev/door-namespace" }}
{{- $places := dict "commonLabels" $values.commonLabels "ray.store.podLabels" $values.ray.store.podLabels }}
{{- range $part := list "worker" "router" "controller" "head" "redis" }}
{{- $_ := set $places (printf "%s.podLabels" $part) (get $values $part).podLabels }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- $_ := set $places (printf "pools.%s.podLabels" $role) ((get $values.pools $role).podLabels | default dict) }}
{{- end }}
{{- range $kind := list "serviceMonitor" "podMonitor" "prometheusRule" "dashboards" }}
{{- $_ := set $places (printf "monitoring.%s.labels" $kind) (get $values.monitoring $kind).labels }}
{{- end }}
{{- range $place, $labels := $places }}
{{- range $label, $_ := $labels }}
{{- if has $label $own }}
{{- fail (printf "%s has %s, which the chart sets itself: its selectors would no longer find the pods; use another name" $place $label) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* (list role root) */}}
{{- define "baton.validateRanks" -}}
{{- $role := index . 0 }}
{{- $root := index . 1 }}
{{- $gpus := (include "baton.pool" . | fromYaml).gpu.count | int }}
{{- $own := (get $root.Values.pools $role).engine | default dict }}
{{- $ranks := get (include "baton.poolEngine" . | fromJson) "tensor_parallel" | default $gpus | int }}
{{- if and $gpus (ne $ranks $gpus) }}
{{- $of := hasKey ((get $root.Values.pools $role).gpu | default dict) "count" | ternary (printf "pools.%s" $role) "worker" }}
{{- $set := hasKey $own "tensor_parallel" | ternary (printf "pools.%s" $role) "config" }}
{{- fail (printf "%s.engine.tensor_parallel (%d) is not %s.gpu.count (%d): each rank of a worker has one GPU. Set pools.%s.gpu.count to the ranks, and no tensor_parallel: the chart derives it" $set $ranks $of $gpus $role) }}
{{- end }}
{{- end }}

{{/* What workers compute on. */}}
{{- define "baton.validateDevices" -}}
{{- $device := dig "model" "device" "auto" .Values.config }}
{{- range $role := list "prefill" "decode" }}
{{- $pool := include "baton.pool" (list $role $) | fromYaml }}
{{- $engine := include "baton.poolEngine" (list $role $) | fromJson }}
{{- $ranks := get $engine "tensor_parallel" | default 1 | int }}
{{- if not $pool.gpu.count }}
{{- if hasPrefix "cuda" $device }}
{{- fail (printf "config.model.device is %s, and the %s pool has no GPUs: set worker.gpu.count, or config.model.device=cpu" $device $role) }}
{{- end }}
{{- if and (gt $ranks 1) (ne $device "cpu") }}
{{- fail (printf "engine.tensor_parallel of the %s pool is %d, and it has no GPUs, of which each rank needs one: set worker.gpu.count=%d, or config.model.device=cpu for ranks on CPUs" $role $ranks $ranks) }}
{{- end }}
{{- if $pool.rdma.enabled }}
{{- fail (printf "the %s pool has RDMA devices and no GPUs: only NCCL, which copies between GPUs, uses them; set worker.gpu.count, or worker.rdma.enabled=false" $role) }}
{{- end }}
{{- else if eq (get $engine "runner" | default "auto") "native" }}
{{- fail (printf "config.engine.runner is native, which computes on CPUs, and the %s pool has GPUs: set config.engine.runner=transformers, or worker.gpu.count=0" $role) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.validateModel" -}}
{{- $cache := .Values.modelCache }}
{{- if and (eq $cache.type "hostPath") (not $cache.hostPath) }}
{{- fail "modelCache.type is hostPath: set modelCache.hostPath to a folder of the nodes" }}
{{- end }}
{{- if not .Values.config.model.id }}
{{- fail "config.model.id is empty: set it to a name of Baton's catalogue, a hub id such as org/name, or a folder of the pods" }}
{{- end }}
{{- if and $cache.prefetch.enabled (ne $cache.type "persistentVolumeClaim") }}
{{- fail (printf "modelCache.prefetch.enabled needs modelCache.type persistentVolumeClaim: a Job cannot fill what is of each pod or node alone (%s)" $cache.type) }}
{{- end }}
{{- $isForMany := or (has "ReadWriteMany" $cache.accessModes) $cache.existingClaim $cache.oneNode }}
{{- if and (eq $cache.type "persistentVolumeClaim") (not $isForMany) }}
{{- fail (printf "modelCache.accessModes is %s: the claim is mounted by the pods of routers, workers and the controller, which Kubernetes places on several nodes, and those of the second node would never start. Use a storage class with ReadWriteMany, or another modelCache.type, or set modelCache.oneNode=true if all pods run on one node" (join ", " $cache.accessModes)) }}
{{- end }}
{{- if eq $cache.type "image" }}
{{- if not $cache.image.reference }}
{{- fail "modelCache.type is image: set modelCache.image.reference to the image that holds the model's folder" }}
{{- end }}
{{- if and $cache.image.tokenizerReference (not .Values.config.model.revision) }}
{{- fail "modelCache.image.tokenizerReference needs config.model.revision, the same whenever the weights are: a router cannot see them" }}
{{- end }}
{{- if not (semverCompare ">=1.31.0-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "modelCache.type image needs Kubernetes 1.31 or newer, and this is %s" .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.validateNetwork" -}}
{{- $values := .Values }}
{{- if and $values.gateway.backendTLS.caConfigMap (not (include "baton.tlsSecretName" .)) }}
{{- fail "gateway.backendTLS.caConfigMap is set, and the routers speak plain text: set tls.issuer.name or tls.existingSecret" }}
{{- end }}
{{- $hpa := $values.router.autoscaling }}
{{- if and $hpa.enabled (not $hpa.targetCPUUtilizationPercentage) (not $hpa.metrics) }}
{{- fail "router.autoscaling has no metric: set router.autoscaling.targetCPUUtilizationPercentage or router.autoscaling.metrics" }}
{{- end }}
{{- range $name := list "worker" "router" "controller" "head" }}
{{- if and (get $values $name).hostNetwork $values.networkPolicy.enabled }}
{{- fail (printf "%s.hostNetwork: NetworkPolicies do not know pods on their node's network, and would cut them off; set networkPolicy.enabled=false" $name) }}
{{- end }}
{{- end }}
{{- range $name := list "prefill" "decode" }}
{{- if and (get $values.pools $name).hostNetwork $values.networkPolicy.enabled }}
{{- fail (printf "pools.%s.hostNetwork: NetworkPolicies do not know pods on their node's network, and would cut them off; set networkPolicy.enabled=false" $name) }}
{{- end }}
{{- end }}
{{- $service := $values.router.service }}
{{- if and (ne $service.type "LoadBalancer") (or $service.loadBalancerClass $service.loadBalancerSourceRanges) }}
{{- fail (printf "router.service.loadBalancerClass and .loadBalancerSourceRanges are for type LoadBalancer, and router.service.type is %s" $service.type) }}
{{- end }}
{{- if and (eq $service.type "ClusterIP") (or $service.nodePorts.grpc $service.nodePorts.http $service.externalTrafficPolicy) }}
{{- fail "router.service.nodePorts and .externalTrafficPolicy are for types NodePort and LoadBalancer, and router.service.type is ClusterIP" }}
{{- end }}
{{- with $values.gateway }}
{{- if and .inferencePool.enabled (not .enabled) }}
{{- fail "gateway.inferencePool.enabled needs gateway.enabled: its HTTPRoute leads to the InferencePool" }}
{{- end }}
{{- if and .inferencePool.enabled (include "baton.tlsSecretName" $) (not .backendTLS.caConfigMap) }}
{{- fail "gateway.inferencePool.enabled: the routers speak TLS, which the Gateway does for an InferencePool only by a BackendTLSPolicy; set gateway.backendTLS.caConfigMap" }}
{{- end }}
{{- if .enabled }}
{{- if not .parentRefs }}
{{- fail "gateway.enabled needs gateway.parentRefs: the Gateway that takes the routes" }}
{{- end }}
{{- if not (and .hostnames .grpcHostnames) }}
{{- fail "gateway.enabled needs gateway.hostnames for HTTP and gateway.grpcHostnames for gRPC: with none of its own, a Gateway takes only one of the two routes" }}
{{- end }}
{{- range $http := .hostnames }}
{{- range $grpc := $values.gateway.grpcHostnames }}
{{- $httpIn := and (hasPrefix "*." $grpc) (hasSuffix (trimPrefix "*" $grpc) $http) }}
{{- $grpcIn := and (hasPrefix "*." $http) (hasSuffix (trimPrefix "*" $http) $grpc) }}
{{- if or (eq $http $grpc) $httpIn $grpcIn }}
{{- fail (printf "gateway.hostnames has %s and gateway.grpcHostnames %s: the Gateway API lets no HTTPRoute and GRPCRoute share a name" $http $grpc) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Whether routers answer Gateways that ask which of them serves a request. */}}
{{- define "baton.picks" -}}
{{- if and .Values.gateway.enabled .Values.gateway.inferencePool.enabled -}}
yes
{{- end }}
{{- end }}

{{/* The name that all releases of an endpoint have in common in Redis. */}}
{{- define "baton.endpoint" -}}
{{ dig "cluster" "endpoint" "" .Values.config | default (include "baton.doorRelease" .) }}
{{- end }}

{{/* Settings: the user's, and what the chart knows. They are JSON inside, so that no number changes its form. */}}
{{- define "baton.config" -}}
{{- $full := include "baton.fullname" . }}
{{- $parts := .Values.parts }}
{{- $config := $parts.model | ternary .Values.config (omit .Values.config "model" "engine" "transfer" "autoscale") | deepCopy }}
{{- $gpus := include "baton.gpusDiffer" . | empty | ternary ((include "baton.pool" (list "decode" .) | fromYaml).gpu.count | int) 0 }}
{{- $rollout := include "baton.rollout" . | fromJson }}
{{- $unavailable := $rollout.maxUnavailable }}
{{- if not (hasSuffix "%" (toString $unavailable)) }}
{{- $unavailable = mul $unavailable .Values.worker.perPod }}
{{- end }}
{{- $cluster := dict
  "max_surge" ($rollout.maxSurge | toString)
  "max_unavailable" ($unavailable | toString)
  "name" $full
  "endpoint" (include "baton.endpoint" .)
  "prefill" (.Values.pools.prefill.initialReplicas | int)
  "decode" (.Values.pools.decode.initialReplicas | int)
  "grpc_port" 50051
  "http_port" 8000
  "controller_host" (include "baton.listenHost" .)
  "controller_port" 50052
  "state_file" "/var/lib/baton/state.json"
  "gpus_per_worker" $gpus }}
{{- if not $parts.model }}
{{- $cluster = pick $cluster "name" "endpoint" "grpc_port" "http_port" }}
{{- end }}
{{- $cluster = merge $cluster (include "baton.tlsCluster" . | fromJson) }}
{{- $kubernetes := dict
  "namespace" .Release.Namespace
  "prefill_pool" (include "baton.poolName" (list "prefill" .))
  "decode_pool" (include "baton.poolName" (list "decode" .)) }}
{{- $_ := set $kubernetes "workers_per_pod" (.Values.worker.perPod | int) }}
{{- $_ := set $kubernetes "in_place" (eq (include "baton.inPlace" .) "yes") }}
{{- if eq .Values.orchestrator "deployments" }}
{{- $groups := include "baton.workerGroups" . | splitList " " }}
{{- $_ := set $kubernetes "prefill_deployment" (printf "%s-%s" $full (first $groups)) }}
{{- $_ := set $kubernetes "decode_deployment" (printf "%s-%s" $full (last $groups)) }}
{{- end }}
{{- if eq .Values.orchestrator "kuberay" }}
{{- range $role := list "prefill" "decode" }}
{{- with include "baton.poolBudget" (list $role $) }}
{{- $_ := set $kubernetes (printf "%s_budget" $role) . }}
{{- end }}
{{- end }}
{{- end }}
{{- $telemetry := dict "host" (include "baton.listenHost" .) "port" 9464 }}
{{- $given := .Values.config.telemetry | default dict }}
{{- if and (include "baton.tlsDrawn" .) $given.otlp_endpoint (not (hasKey $given "otlp_tls")) }}
{{- $_ := set $telemetry "otlp_tls" true }}
{{- end }}
{{- $set := dict "cluster" $cluster "telemetry" $telemetry }}
{{- if $parts.model }}
{{- $_ := set $set "kubernetes" $kubernetes }}
{{- $model := dict "release" (include "baton.modelRelease" .) }}
{{- if eq .Values.modelCache.type "image" }}
{{- $_ := set $model "path" (printf "/var/lib/baton-model/%s" (trimAll "/" .Values.modelCache.image.path) | trimSuffix "/") }}
{{- end }}
{{- $_ := set $set "model" $model }}
{{- if $gpus }}
{{- $_ := set $set "engine" (dict "tensor_parallel" $gpus) }}
{{- end }}
{{- with include "baton.poolsConfig" . | fromJson }}
{{- $_ := set $set "pools" . }}
{{- end }}
{{- end }}
{{- if .Values.redis.external.url }}
{{- $_ := set $set "index" (dict "redis_url" .Values.redis.external.url) }}
{{- end }}
{{- if $parts.door }}
{{- $router := $parts.model | ternary (dict) (dict "own_model" false) }}
{{- if include "baton.tenantsSecretName" . }}
{{- $_ := set $router "tenants_file" "/etc/baton-tenants/tenants.yaml" }}
{{- end }}
{{- /* gRPC lets an age vary by a tenth: with the computed one all clients have gone elsewhere before a router stops. */}}
{{- with .Values.router.maxConnectionAgeSeconds | default (mulf 0.8 .Values.router.preStopSeconds) }}
{{- $_ := set $router "max_connection_age_s" . }}
{{- end }}
{{- if include "baton.picks" . }}
{{- $_ := set $router "picker_port" 9002 }}
{{- end }}
{{- if ne .Values.tls.clientCertificates "off" }}
{{- $_ := set $router "tls_client_certificates" .Values.tls.clientCertificates }}
{{- end }}
{{- $_ := set $set "router" $router }}
{{- end }}
{{- range $section, $values := mergeOverwrite $config $set }}
{{- if $values }}
{{ $section }}:
{{- range $name, $value := $values }}
  {{ $name }}: {{ $value | toJson }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* What a pool's worker reads. When only another section or the other pool's engine changes, workers need not restart.
     (list group root) */}}
{{- define "baton.workerConfigChecksum" -}}
{{- $root := index . 1 }}
{{- $settings := pick (deepCopy $root.Values.config) "model" "transfer" "index" "telemetry" "testing" }}
{{- $_ := set $settings "model" (omit $settings.model "release" "share") }}
{{- printf "%s%s%s" ($settings | toJson) (include "baton.poolEngine" .) (include "baton.tlsSecretName" $root) | sha256sum }}
{{- end }}

{{/* What the controller reads, hands to workers, and announces. */}}
{{- define "baton.controllerConfigChecksum" -}}
{{- $endpoint := .Values.parts.door | ternary "" (include "baton.endpoint" .) }}
{{- printf "%s%s%s%s%s%s%s" (omit .Values.config "router" | toJson) (dig "router" "mode" "" .Values.config) $endpoint (include "baton.poolsConfig" .) (include "baton.tlsSecretName" .) (include "baton.inPlace" .) (include "baton.rollout" .) | sha256sum }}
{{- end }}

{{/* Pods */}}

{{/* Where a pod may run, and its network. labelSelectors of spread constraints are filled in. (list values component root) */}}
{{- define "baton.scheduling" -}}
{{- $values := index . 0 }}
{{- $component := index . 1 }}
{{- $root := index . 2 }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- if $values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with $values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $selector := dict "matchLabels" (include "baton.selector" (list $component $root) | fromYaml) }}
  - {{- merge (dict) . (dict "labelSelector" $selector) | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What every pod begins with. Service links are off: a Service called `baton` would put BATON_PORT and others into the
     environment, and Baton refuses settings that it does not know. (list service-account token root) */}}
{{- define "baton.podCommon" -}}
{{- $root := index . 2 -}}
serviceAccountName: {{ index . 0 | quote }}
automountServiceAccountToken: {{ index . 1 }}
enableServiceLinks: false
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Of Baton's own processes, before their part's own. */}}
{{- define "baton.podEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOME
  value: /var/tmp
- name: TMPDIR
  value: /var/tmp
- name: USER
  value: baton
{{- end }}

{{- define "baton.env" -}}
{{ include "baton.podEnv" . }}
- name: BATON_CACHE
  value: /var/cache/baton
- name: HF_HOME
  value: /var/cache/baton/huggingface
- name: TRITON_CACHE_DIR
  value: /var/cache/baton/triton
{{- end }}

{{/* Where the index is, for a user of it: router, worker, controller or doctor. (list user root) */}}
{{- define "baton.redisEnv" -}}
{{- $root := index . 1 }}
{{- with $root.Values.redis.external.existingSecret }}
- name: BATON_INDEX_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $root.Values.redis.external.key | quote }}}}
{{- end }}
{{- if $root.Values.redis.enabled }}
- name: INDEX_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "baton.redisSecretName" $root | quote }}, key: {{ index . 0 | quote }}}}
- name: BATON_INDEX_REDIS_URL
  value: {{ include "baton.redisTls" $root | empty | ternary "redis" "rediss" }}://{{ index . 0 }}:$(INDEX_REDIS_PASSWORD)@{{ include "baton.redisHost" $root }}:6379/0
{{- end }}
{{- end }}

{{/* Ray would run its actors, and so the workers, at nice 15, behind its own agents. preStop has drained a node before it
     is asked to end; Ray would try again, for long where the head is gone. */}}
{{- define "baton.rayEnv" -}}
- name: RAY_worker_niceness
  value: "0"
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: "0"
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "baton.raySecretName" . | quote }}, key: {{ .Values.ray.token.key | quote }}}}
{{- end }}

{{/* With a store, the next head knows Ray's nodes and actors, so nodes wait ten minutes for it, as under KubeRay. Without a
     store they wait for Ray's default of one minute, and join the next head as new nodes. */}}
{{- define "baton.rayWaitEnv" -}}
{{- if .Values.ray.store.enabled }}
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "600"
{{- end }}
{{- end }}

{{- define "baton.routerEnv" -}}
{{ include "baton.env" . }}
{{- include "baton.redisEnv" (list "router" .) }}
- name: BATON_CLUSTER_SECRET
  value: /run/baton-keys/keys
- name: BATON_ROUTER_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: BATON_ROUTER_CACHE_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "baton.cacheSecretName" . | quote }}, key: {{ .Values.router.cacheSecret.key | quote }}}}
- name: BATON_CLUSTER_HOST
  value: {{ include "baton.listenHost" . | quote }}
- name: BATON_CLUSTER_ADVERTISE_HOST
  value: $(POD_IP)
{{- end }}

{{- define "baton.controllerEnv" -}}
{{ include "baton.env" . }}
{{- include "baton.redisEnv" (list "controller" .) }}
- name: BATON_CLUSTER_SECRET
  value: /run/baton-keys/keys
{{ include "baton.rayEnv" . }}
{{- include "baton.rayWaitEnv" . }}
- name: BATON_CLUSTER_RAY_ADDRESS
  value: {{ include "baton.headHost" . }}:6379
- name: BATON_CLUSTER_RAY_NODE_IP
  value: $(POD_IP)
- name: BATON_CLUSTER_ADVERTISE_HOST
  value: $(POD_IP)
{{- end }}

{{- define "baton.workerEnv" -}}
{{ include "baton.env" . }}
{{- include "baton.redisEnv" (list "worker" .) }}
- name: BATON_CLUSTER_SECRET
  value: /run/baton-keys/keys
{{ include "baton.rayEnv" . }}
{{- include "baton.rayWaitEnv" . }}
- name: BATON_CLUSTER_RAY_ADDRESS
  value: {{ include "baton.headHost" . }}:6379
{{- end }}

{{- define "baton.mounts" -}}
- name: config
  mountPath: /etc/baton
  readOnly: true
- name: model-cache
  mountPath: /var/cache/baton
- name: tmp
  mountPath: /var/tmp
{{- include "baton.modelMount" . }}
{{- include "baton.tlsMount" . }}
{{- end }}

{{/* Of an OCI image with a model. */}}
{{- define "baton.modelMount" -}}
{{- if and .Values.parts.model (eq .Values.modelCache.type "image") }}
- name: model
  mountPath: /var/lib/baton-model
  readOnly: true
{{- end }}
{{- end }}

{{/* (dict "weights" "root") */}}
{{- define "baton.modelVolume" -}}
{{- if and .root.Values.parts.model (eq .root.Values.modelCache.type "image") }}
{{- with .root.Values.modelCache.image }}
- name: model
  image:
    reference: {{ empty $.weights | ternary (.tokenizerReference | default .reference) .reference | quote }}
    pullPolicy: {{ .pullPolicy }}
{{- end }}
{{- end }}
{{- end }}

{{/* A container's resources, with what it asks of its node's disk for the model. (list resources weights|tokenizer root) */}}
{{- define "baton.withDisk" -}}
{{- $resources := deepCopy (index . 0) }}
{{- $cache := (index . 2).Values.modelCache }}
{{- with get $cache.ephemeralStorage (index . 1) }}
{{- if eq $cache.type "emptyDir" }}
{{- $resources = merge $resources (dict "requests" (dict "ephemeral-storage" .)) }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* Of a Ray node: /tmp/ray is Ray's own; /dev/shm holds its object store. */}}
{{- define "baton.nodeMounts" -}}
- name: ray
  mountPath: /tmp/ray
- name: shared-memory
  mountPath: /dev/shm
- name: tmp
  mountPath: /var/tmp
{{- end }}

{{/* The same with what Baton's own processes read. */}}
{{- define "baton.rayMounts" -}}
{{ include "baton.nodeMounts" . }}
- name: config
  mountPath: /etc/baton
  readOnly: true
- name: model-cache
  mountPath: /var/cache/baton
{{- include "baton.modelMount" . }}
{{- include "baton.tlsMount" . }}
{{- end }}

{{- define "baton.controllerMounts" -}}
{{ include "baton.rayMounts" . }}
- name: state
  mountPath: /var/lib/baton
{{- end }}

{{- define "baton.volumes" -}}
- name: tmp
  emptyDir: {}
{{ include "baton.ownVolumes" . }}
{{- end }}

{{/* What Baton's own processes read. */}}
{{- define "baton.ownVolumes" -}}
- name: release-config
  configMap:
    name: {{ include "baton.fullname" . }}-config
- name: config # a copy: an upgrade changes the ConfigMap under running pods, whose release may not know all new names
  emptyDir:
    sizeLimit: 2Mi
- name: model-cache
{{- if not .Values.parts.model }}
  emptyDir: {}
{{- else if eq .Values.modelCache.type "persistentVolumeClaim" }}
  persistentVolumeClaim:
    claimName: {{ .Values.modelCache.existingClaim | default (printf "%s-models" (include "baton.fullname" .)) | quote }}
{{- else if eq .Values.modelCache.type "hostPath" }}
  hostPath:
    path: {{ .Values.modelCache.hostPath | quote }}
    type: DirectoryOrCreate
{{- else if .Values.modelCache.sizeLimit }}
  emptyDir:
    sizeLimit: {{ .Values.modelCache.sizeLimit }}
{{- else }}
  emptyDir: {}
{{- end }}
{{- include "baton.tlsVolume" . }}
{{- end }}

{{/* Of a Ray node. (shared-memory-size) */}}
{{- define "baton.nodeVolumes" -}}
- name: ray
  emptyDir: {}
- name: tmp
  emptyDir: {}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}

{{/* (list shared-memory-size root) */}}
{{- define "baton.rayVolumes" -}}
{{ include "baton.nodeVolumes" (index . 0) }}
{{ include "baton.ownVolumes" (index . 1) }}
{{- end }}

{{/* The keys with which a pod's processes prove to others who they are, each member's in a volume of its own; the secret
     from which they are made is in these containers alone. They follow a change of it where Kubernetes has sidecars, but
     in a pod whose containers see each other's processes they must have ended: by /proc the others would see the secret.
     (dict "members" "sharesProcesses" "image" "securityContext" "root"), members: name of container and volume -> role */}}
{{- define "baton.keysContainers" -}}
{{- $follows := and (not .sharesProcesses) (semverCompare ">=1.29.0-0" .root.Capabilities.KubeVersion.Version) }}
{{- range $name, $role := .members }}
{{- $file := printf "/run/baton-%s/keys" $name }}
- name: {{ $name }}
  image: {{ include "baton.image" (list $.image $.root) | quote }}
  imagePullPolicy: {{ $.image.pullPolicy }}
  command: [baton, keys, --role, {{ $role }}, --secret, /etc/baton-cluster/secret, --out, {{ $file }}{{ $follows | ternary ", --follow" "" }}]
  {{- if $follows }}
  restartPolicy: Always
  startupProbe:
    exec: {command: [test, -s, {{ $file }}]}
    periodSeconds: 1
    timeoutSeconds: 5
    failureThreshold: 120
  readinessProbe: # the pod's readiness hangs on it, and on a busy machine a command takes seconds to start
    exec: {command: [test, -s, {{ $file }}]}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  livenessProbe:
    exec: {command: [test, -s, {{ $file }}]}
    periodSeconds: 30
    timeoutSeconds: 5
  {{- end }}
  env:
    - name: HOME
      value: /var/tmp
    - name: TMPDIR
      value: /var/tmp
  resources:
    {{- toYaml $.root.Values.clusterSecret.resources | nindent 4 }}
  securityContext:
    {{- toYaml $.securityContext | nindent 4 }}
  volumeMounts:
    - name: cluster-secret
      mountPath: /etc/baton-cluster
      readOnly: true
    - name: {{ $name }}
      mountPath: /run/baton-{{ $name }}
    - name: tmp
      mountPath: /var/tmp
{{- end }}
{{- end }}

{{- define "baton.keysMount" -}}
- name: keys
  mountPath: /run/baton-keys
  readOnly: true
{{- end }}

{{/* (list names root) */}}
{{- define "baton.keysVolumes" -}}
{{- $root := index . 1 -}}
- name: cluster-secret
  secret:
    secretName: {{ include "baton.clusterSecretName" $root | quote }}
    defaultMode: 0440
    items:
      - {key: {{ $root.Values.clusterSecret.key | quote }}, path: secret}
{{- range index . 0 }}
- name: {{ . }}
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
{{- end }}
{{- end }}

{{/* The keys first, then the user's, then the model, then the check of what the part needs.
     (dict "part" "members" "sharesProcesses" "image" "env" "mounts" "resources" "securityContext" "values" "root"),
     values: the part's, of which initContainers, extraEnv, envFrom and extraVolumeMounts are read here */}}
{{- define "baton.initContainers" -}}
{{- include "baton.keysContainers" . }}
- name: settings # the pod keeps those with which it has started
  image: {{ include "baton.image" (list .image .root) | quote }}
  imagePullPolicy: {{ .image.pullPolicy }}
  command: [sh, -c, "test -e /etc/baton/baton.yaml || { cp /etc/baton-release/baton.yaml /etc/baton/new && mv /etc/baton/new /etc/baton/baton.yaml; }"]
  resources:
    {{- toYaml .root.Values.clusterSecret.resources | nindent 4 }}
  securityContext:
    {{- toYaml .securityContext | nindent 4 }}
  volumeMounts:
    - name: release-config
      mountPath: /etc/baton-release
      readOnly: true
    - name: config
      mountPath: /etc/baton
{{- with .values.initContainers }}
{{ toYaml . }}
{{- end }}
{{- $names := list "model" }}
{{- if and (eq .part "router") (not (include "baton.ownModel" .root)) }}
{{- $names = list }}
{{- end }}
{{- if .root.Values.checks.enabled }}
{{- $names = append $names "check" }}
{{- end }}
{{- range $name := $names }}
- name: {{ $name }}
  image: {{ include "baton.image" (list $.image $.root) | quote }}
  imagePullPolicy: {{ $.image.pullPolicy }}
  {{- if eq $name "model" }}
  command: [baton, run, model{{ eq $.part "worker" | ternary "" ", --no-weights" }}, --config, /etc/baton/baton.yaml]
  {{- else }}
  command: [baton, doctor, --part, {{ $.part }}, --wait, "60", --config, /etc/baton/baton.yaml]
  {{- end }}
  env:
    {{- /* Who fetches the model needs no other secret. */}}
    {{- eq $name "model" | ternary (include "baton.env" $.root) $.env | nindent 4 }}
    {{- if and (eq $name "model") $.root.Values.huggingFace.existingSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ $.root.Values.huggingFace.existingSecret | quote }}, key: {{ $.root.Values.huggingFace.key | quote }}}}
    {{- end }}
    {{- with $.values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "baton.envFrom" $.values | nindent 2 }}
  resources:
    {{- toYaml $.resources | nindent 4 }}
  securityContext:
    {{- toYaml $.securityContext | nindent 4 }}
  volumeMounts:
    {{- $.mounts | nindent 4 }}
    {{- if eq $name "check" }}
    {{- include "baton.keysMount" $.root | nindent 4 }}
    {{- end }}
    {{- with $.values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}

{{/* (a part's values) */}}
{{- define "baton.envFrom" -}}
{{- with .envFrom -}}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The budget of a pod that is the only one of its kind. A number that stays, not one that may be missing: Kubernetes
     cannot tell how many pods a RayCluster should have. (list component budget root) */}}
{{- define "baton.budgetOfOne" -}}
{{- if (index . 1).enabled }}
{{- $root := index . 2 }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "baton.fullname" $root }}-{{ index . 0 }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "baton.labels" (list (index . 0) $root) | nindent 4 }}
spec:
  unhealthyPodEvictionPolicy: AlwaysAllow # else a pod that never gets ready blocks every drain
  minAvailable: 1
  selector:
    matchLabels:
      {{- include "baton.selector" (list (index . 0) $root) | nindent 6 }}
---
{{- end }}
{{- end }}

{{/* Whether anybody may scrape: the peers that are named, or all if a monitor is on and nothing is to be kept from anyone. */}}
{{- define "baton.scrapers" -}}
{{- $scrapes := or .Values.monitoring.serviceMonitor.enabled .Values.monitoring.podMonitor.enabled }}
{{- $isOpen := not (or .Values.networkPolicy.clients (include "baton.tenantsSecretName" .)) }}
{{- if or .Values.networkPolicy.monitoring (and $scrapes $isOpen) }}yes{{ end }}
{{- end }}
