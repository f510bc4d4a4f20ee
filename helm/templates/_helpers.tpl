{{- define "kvasir.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "kvasir.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains (include "kvasir.name" .) .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kvasir.name" .) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvasir.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvasir.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvasir.labels" -}}
{{ include "kvasir.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvasir.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvasir.serviceAccountName" -}}
{{ .Values.serviceAccount.name | default (include "kvasir.fullname" .) }}
{{- end }}

{{/* The secret that holds the API keys; empty where there are none. */}}
{{- define "kvasir.keySecret" -}}
{{- if .Values.apiKey.value }}{{ include "kvasir.fullname" . }}-keys{{ else }}{{ .Values.apiKey.secretName }}{{ end }}
{{- end }}

{{- define "kvasir.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvasir.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .Values.readOnlyRootFilesystem }}
capabilities: {drop: [ALL]}
{{- end }}

{{/* What the world may reach; health and metrics stay inside. */}}
{{- define "kvasir.publicPaths" -}}
prefixes: [/v1, /static]
exact: [/, /generate, /generate_stream, /info, /tokenize, /detokenize, /explain, /openapi.json, /version]
{{- end }}

{{/* The sum that replicas are scaled by. */}}
{{- define "kvasir.load" -}}
sum(kvasir_num_requests_waiting{namespace="{{ .Release.Namespace }}"} + kvasir_num_requests_running{namespace="{{ .Release.Namespace }}"})
{{- end }}
