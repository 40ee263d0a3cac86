{{- define "queen.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* The release's name when it says what it is. 50 characters leave room for "-headless" and the pod's number. */}}
{{- define "queen.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "queen.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "queen.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "queen.selector" -}}
app.kubernetes.io/name: {{ include "queen.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "queen.labels" -}}
{{ include "queen.selector" . }}
app.kubernetes.io/component: server
app.kubernetes.io/part-of: queen
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "queen.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "queen.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Mistakes that the schema cannot see. */}}
{{- define "queen.check" -}}
{{- if .Values.postgres.embedded }}
{{- if or (gt (int .Values.replicas) 1) (ne .Values.autoscaling.type "none") }}
{{- fail "postgres.embedded: each pod would have a PostgreSQL of its own; set replicas: 1 and autoscaling.type: none, or use one PostgreSQL for all" }}
{{- end }}
{{- if not .Values.persistence.enabled }}
{{- fail "postgres.embedded needs persistence.enabled: without a volume every message is lost with the pod" }}
{{- end }}
{{- end }}
{{- if lt (mul (int .Values.terminationGracePeriodSeconds) 1000) (add (int (.Values.settings.SHUTDOWN_DELAY_MS | default 0)) 10000) }}
{{- fail "terminationGracePeriodSeconds must be at least 10 s longer than settings.SHUTDOWN_DELAY_MS" }}
{{- end }}
{{- range $name := list "PORT" "HOST" "QUEEN_DATA_DIR" "QUEEN_UDP_PEERS" "QUEEN_UDP_NOTIFY_PORT" "PG_HOST" "PG_PORT" "PG_DB" "PG_USE_SSL" "PG_SSL_REJECT_UNAUTHORIZED" }}
{{- if hasKey $.Values.settings $name }}
{{- fail (printf "settings.%s is set by the chart: use the value it is made from (postgres, peers, service)" $name) }}
{{- end }}
{{- end }}
{{- range $name := list "PG_PASSWORD" "REDIS_PASSWORD" "QUEEN_SYNC_SECRET" "QUEEN_ENCRYPTION_KEY" "JWT_SECRET" "DATABASE_URLS" }}
{{- if hasKey $.Values.settings $name }}
{{- fail (printf "settings.%s is a secret: put it into a Secret that envFrom names" $name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Whole numbers of a values file arrive as floats: 600000 must not become 6e+05. */}}
{{- define "queen.text" -}}
{{- if kindIs "float64" . }}
{{- if eq . (floor .) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}
{{- else }}{{ . }}
{{- end }}
{{- end }}
