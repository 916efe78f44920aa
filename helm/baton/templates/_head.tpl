{{/* The pod of Ray's head. Nothing of Baton's configuration is in it, so that no change of the configuration ends Ray. */}}
{{- define "baton.headTemplate" -}}
{{- $kuberay := eq .Values.orchestrator "kuberay" }}
metadata:
  labels:
    {{- include "baton.podLabels" (list "head" .Values.head.podLabels .) | nindent 4 }}
  {{- with include "baton.podAnnotations" .Values.head | trim }}
  annotations:
    {{- . | nindent 4 }}
  {{- end }}
spec:
  {{- /* KubeRay adds its autoscaler to this pod, which asks the Kubernetes API. */}}
  {{- include "baton.podCommon" (list (include "baton.account" (list "head" .)) $kuberay .) | nindent 2 }}
  {{- include "baton.scheduling" (list .Values.head "head" .) | nindent 2 }}
  terminationGracePeriodSeconds: {{ add (ceil .Values.config.cluster.stop_timeout_s | int) 10 }}
  {{- with .Values.head.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray
      image: {{ include "baton.image" (list .Values.image.worker .) | quote }}
      imagePullPolicy: {{ .Values.image.worker.pullPolicy }}
      {{- if not $kuberay }}
      command:
        - ray
        - start
        - --head
        - --block
        - --port=6379
        - --node-ip-address=$(POD_IP)
        - --num-cpus=0
        - --num-gpus=0
        - --object-store-memory=100000000
        - --include-dashboard=false
        - --include-log-monitor=false # no worker's output is here
        - --no-monitor # of Ray's autoscaler, which has nothing to do
        - --disable-usage-stats
        - --temp-dir=/tmp/ray
        {{- range $name, $port := include "baton.rayPorts" . | fromYaml }}
        - --{{ $name }}={{ $port | int }}
        {{- end }}
        {{- if .Values.ray.store.enabled }}
        - --redis-password=$(RAY_STORE_PASSWORD)
        {{- end }}
      {{- end }}
      env:
        {{- include "baton.podEnv" . | nindent 8 }}
        {{- include "baton.rayEnv" . | nindent 8 }}
        {{- if .Values.ray.store.enabled }}
        {{- include "baton.rayWaitEnv" . | trim | nindent 8 }}
        {{- if not $kuberay }}
        - name: RAY_STORE_PASSWORD
          valueFrom: {secretKeyRef: {name: {{ include "baton.rayStoreSecretName" . | quote }}, key: {{ .Values.ray.store.password.key | quote }}}}
        - name: RAY_REDIS_ADDRESS
          value: {{ include "baton.rayStoreHost" . }}:6379
        - name: RAY_external_storage_namespace
          value: {{ include "baton.fullname" . | quote }}
        {{- end }}
        {{- end }}
        {{- with .Values.head.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with include "baton.envFrom" .Values.head }}
      {{- . | nindent 6 }}
      {{- end }}
      ports:
        - name: ray
          containerPort: 6379
        - name: raylet # with the machine's network it keeps a second Ray node from that machine
          containerPort: 6380
      startupProbe:
        tcpSocket: {port: ray}
        periodSeconds: 2
        failureThreshold: 90
      readinessProbe:
        tcpSocket: {port: ray}
        periodSeconds: 5
      livenessProbe:
        tcpSocket: {port: ray}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      resources:
        {{- toYaml .Values.head.resources | nindent 8 }}
      securityContext:
        {{- toYaml .Values.containerSecurityContext | nindent 8 }}
      volumeMounts:
        {{- include "baton.nodeMounts" . | nindent 8 }}
        {{- with .Values.head.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with .Values.head.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "baton.nodeVolumes" "256Mi" | nindent 4 }}
    {{- with .Values.head.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
