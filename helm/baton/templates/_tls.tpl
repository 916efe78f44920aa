{{/* Certificates. Without them each of these is empty, and all processes speak plain text. */}}

{{- define "baton.tlsSecretName" -}}
{{- if .Values.tls.existingSecret -}}
{{ .Values.tls.existingSecret }}
{{- else if .Values.tls.issuer.name -}}
{{ include "baton.fullname" . }}-tls
{{- end }}
{{- end }}

{{/* Whether an issuer draws the certificate: then TLS is on wherever it can be. */}}
{{- define "baton.tlsDrawn" -}}
{{- if and .Values.tls.issuer.name (not .Values.tls.existingSecret) -}}
true
{{- end }}
{{- end }}

{{/* Whether the chart's own Redis speaks TLS: clients look for its host name, which a certificate that the chart asks for has. */}}
{{- define "baton.redisTls" -}}
{{- if and .Values.redis.enabled (or .Values.redis.tls (include "baton.tlsDrawn" .)) -}}
true
{{- end }}
{{- end }}

{{/* The name for which members look in each other's certificates. */}}
{{- define "baton.tlsMemberName" -}}
{{ dig "cluster" "tls_name" "baton" .Values.config }}
{{- end }}

{{/* Settings of section `cluster`, as JSON. */}}
{{- define "baton.tlsCluster" -}}
{{- $settings := dict }}
{{- if include "baton.tlsSecretName" . }}
{{- $settings = dict "tls_certificate" "/etc/baton-tls/tls.crt" "tls_key" "/etc/baton-tls/tls.key" "tls_ca" "/etc/baton-tls/ca.crt" }}
{{- end }}
{{- toJson $settings }}
{{- end }}

{{- define "baton.tlsMount" -}}
{{- if include "baton.tlsSecretName" . }}
- name: tls
  mountPath: /etc/baton-tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "baton.tlsVolume" -}}
{{- with include "baton.tlsSecretName" . }}
- name: tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* Of clients in the cluster. */}}
{{- define "baton.tlsClientEnv" -}}
{{- if include "baton.tlsSecretName" . }}
- name: BATON_CA
  value: /etc/baton-tls/ca.crt
- name: BATON_CERTIFICATE
  value: /etc/baton-tls/tls.crt
- name: BATON_KEY
  value: /etc/baton-tls/tls.key
{{- end }}
{{- end }}

{{/* The kubelet's gRPC probes know no TLS. */}}
{{- define "baton.controllerProbe" -}}
{{ empty (include "baton.tlsSecretName" .) | ternary "grpc" "tcpSocket" }}: {port: 50052}
{{- end }}

{{- define "baton.routerProbe" -}}
port: http
{{- if include "baton.tlsSecretName" . }}, scheme: HTTPS
{{- end }}
{{- end }}

{{/* How Prometheus reads the routers. */}}
{{- define "baton.tlsScrape" -}}
{{- with include "baton.tlsSecretName" . }}
scheme: https
tlsConfig:
  serverName: {{ include "baton.tlsMemberName" $ | quote }}
  ca:
    secret:
      name: {{ . | quote }}
      key: ca.crt
{{- end }}
{{- end }}
