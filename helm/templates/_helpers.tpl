{{- define "kvasir.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* A longer name would make Kubernetes truncate the pods' names, which autoscaling selects. */}}
{{- define "kvasir.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 46 | trimSuffix "-" }}
{{- else if contains (include "kvasir.name" .) .Release.Name }}
{{- .Release.Name | trunc 46 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kvasir.name" .) | trunc 46 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The test's pod has these labels, too; selectors add the component to select only the server's pods. */}}
{{- define "kvasir.identity" -}}
app.kubernetes.io/name: {{ include "kvasir.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "kvasir.selectorLabels" -}}
{{ include "kvasir.identity" . }}
app.kubernetes.io/component: server
{{- end }}

{{- define "kvasir.testLabels" -}}
{{ include "kvasir.identity" . }}
app.kubernetes.io/component: test
{{- end }}

{{- define "kvasir.ownLabels" -}}
{{ include "kvasir.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}

{{- define "kvasir.labels" -}}
{{ include "kvasir.ownLabels" . }}
{{- with .Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvasir.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "kvasir.serviceAccountName" -}}
{{ .Values.serviceAccount.name | default (include "kvasir.fullname" .) }}
{{- end }}

{{/* Name of the secret with the API keys; empty without keys. */}}
{{- define "kvasir.keySecret" -}}
{{- if .Values.apiKey.value }}{{ include "kvasir.fullname" . }}-keys{{ else }}{{ .Values.apiKey.secretName }}{{ end }}
{{- end }}

{{/* Name of the secret with the salt and the URL of the shared state; empty without. */}}
{{- define "kvasir.stateSecret" -}}
{{- if or .Values.sharedState.salt .Values.sharedState.url }}{{ include "kvasir.fullname" . }}-state{{ else }}{{ .Values.sharedState.secretName }}{{ end }}
{{- end }}

{{/* Image pull secrets and placement of every pod of the release. */}}
{{- define "kvasir.placement" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The setting model: one directory, or several by name. */}}
{{- define "kvasir.models" -}}
{{- $models := list }}
{{- range .Values.model.directories }}{{ $models = append $models (printf "%s=/models/served/%s" .name .path) }}{{ end }}
{{- join "," ($models | default (list "/models/served")) }}
{{- end }}

{{/* Names of a server without keys: the Service's, those of the routes (all, if a route has none), and the setting's. */}}
{{- define "kvasir.allowedHosts" -}}
{{- $names := list (include "kvasir.fullname" .) }}
{{- range list "" ".svc" ".svc.cluster.local" }}
{{- $names = append $names (printf "%s.%s%s" (include "kvasir.fullname" $) $.Release.Namespace .) }}
{{- end }}
{{- if .Values.httpRoute.enabled }}{{ $names = concat $names (.Values.httpRoute.hostnames | default (list "*")) }}{{ end }}
{{- if .Values.ingress.enabled }}{{ $names = concat $names .Values.ingress.hosts }}{{ end }}
{{- join "," (concat $names (.Values.settings.allowed_hosts | default list)) }}
{{- end }}

{{/* A quantity in bytes. */}}
{{- define "kvasir.bytes" -}}
{{- $factors := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- if kindIs "string" . }}{{ mulf (regexFind "^[0-9.]+" .) (get $factors (regexFind "[a-zA-Z]*$" .)) | int64 }}{{ else }}{{ int64 . }}{{ end }}
{{- end }}

{{/* Public paths; health, metrics and debugging stay internal. publishExplain adds /explain. */}}
{{- define "kvasir.batchClaim" -}}
{{- .Values.batches.claimName | default (printf "%s-batches" (include "kvasir.fullname" .)) }}
{{- end }}

{{/* Whether several servers answer the same batches. */}}
{{- define "kvasir.sharesBatches" -}}
{{- if and (or .Values.sharedState.url .Values.sharedState.secretName) (eq .Values.batches.accessMode "ReadWriteMany") }}true{{ end }}
{{- end }}

{{- define "kvasir.publicPaths" -}}
prefixes: [/v1, /v2, /api, /static]
exact: [/, /model, /generate, /generate_stream, /info, /embed, /embed_all, /similarity, /rerank, /predict, /score,
  /pooling, /classify, /tokenize, /detokenize, /openapi.json, /docs, /version]
{{- end }}

{{/* The sum for scaling: running and waiting requests of this Deployment's pods alone, in any job. */}}
{{- define "kvasir.load" -}}
{{- $pods := printf "namespace=%q, pod=~\"%s-[a-z0-9]+-[a-z0-9]{5}\"" .Release.Namespace (include "kvasir.fullname" .) -}}
sum(max by (pod, model) (kvasir_num_requests_waiting{ {{- $pods -}} }) + max by (pod, model) (kvasir_num_requests_running{ {{- $pods -}} }))
{{- end }}
