{{/* The head's pod: Ray's head, and the controller. Under KubeRay the pod is never restarted in place (its autoscaler v2
     sets restartPolicy Never), and the controller has to be: there it is a sidecar among the init containers. */}}
{{- define "baton.headTemplate" -}}
{{- $kuberay := eq .Values.orchestrator "kuberay" }}
metadata:
  labels:
    {{- include "baton.podLabels" (list "head" .Values.head.podLabels .) | nindent 4 }}
  {{- $annotations := .Values.head.podAnnotations }}
  {{- if .Values.ray.store.enabled }}
  {{- $annotations = merge (dict "checksum/config" (include "baton.controllerConfigChecksum" .)) $annotations }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "baton.podCommon" (list (printf "%s-controller" (include "baton.fullname" .)) true .) | nindent 2 }}
  {{- include "baton.scheduling" (list .Values.head "head" .) | nindent 2 }}
  terminationGracePeriodSeconds: {{ add (ceil .Values.config.cluster.stop_timeout_s | int) 10 }}
  initContainers:
    {{- include "baton.initContainers" (dict
        "part" "controller"
        "image" .Values.image.worker
        "env" (include "baton.controllerEnv" .)
        "mounts" (include "baton.headMounts" .)
        "resources" .Values.head.controllerResources
        "securityContext" .Values.containerSecurityContext
        "extraEnv" .Values.head.extraEnv
        "extraVolumeMounts" .Values.head.extraVolumeMounts
        "root" .) | nindent 4 }}
    {{- if $kuberay }}
    {{- include "baton.controller" . | nindent 4 }}
      restartPolicy: Always
    {{- end }}
  containers:
    - name: ray
      image: {{ include "baton.image" (list .Values.image.worker .) }}
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
        - --disable-usage-stats
        - --min-worker-port=0
        - --max-worker-port=0
      {{- end }}
      env:
        {{- include "baton.env" . | nindent 8 }}
        {{- include "baton.rayEnv" . | nindent 8 }}
        {{- if .Values.ray.store.enabled }}
        {{- include "baton.rayWaitEnv" . | trim | nindent 8 }}
        {{- if not $kuberay }}
        - name: RAY_REDIS_ADDRESS
          value: {{ include "baton.rayStoreHost" . }}:6379
        - name: RAY_external_storage_namespace
          value: {{ include "baton.fullname" . }}
        {{- end }}
        {{- end }}
        {{- with .Values.head.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: ray
          containerPort: 6379
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
        {{- include "baton.rayMounts" . | nindent 8 }}
        {{- with .Values.head.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- if not $kuberay }}
    {{- include "baton.controller" . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "baton.rayVolumes" (list "256Mi" .) | nindent 4 }}
    - name: state
      emptyDir: {}
    {{- with .Values.head.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "baton.controller" -}}
- name: controller
  image: {{ include "baton.image" (list .Values.image.worker .) }}
  imagePullPolicy: {{ .Values.image.worker.pullPolicy }}
  command: [baton, run, controller, --config, /etc/baton/baton.yaml]
  env:
    {{- include "baton.controllerEnv" . | nindent 4 }}
    {{- with .Values.head.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: controller
      containerPort: 50052
  {{- /* Under KubeRay a startup probe would hold Ray up, and the controller waits for Ray. */}}
  {{- if ne .Values.orchestrator "kuberay" }}
  startupProbe:
    grpc: {port: 50052}
    periodSeconds: 2
    timeoutSeconds: 3
    failureThreshold: 90
  {{- end }}
  readinessProbe:
    grpc: {port: 50052}
    periodSeconds: 5
    timeoutSeconds: 3
  livenessProbe:
    grpc: {port: 50052}
    initialDelaySeconds: {{ eq .Values.orchestrator "kuberay" | ternary (ceil .Values.config.cluster.start_timeout_s | int) 0 }}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  resources:
    {{- toYaml .Values.head.controllerResources | nindent 4 }}
  securityContext:
    {{- toYaml .Values.containerSecurityContext | nindent 4 }}
  volumeMounts:
    {{- include "baton.headMounts" . | nindent 4 }}
    {{- with .Values.head.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
