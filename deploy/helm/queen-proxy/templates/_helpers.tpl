{{- define "queen-proxy.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* The release's name when it says what it is. 50 characters leave room for the pod's number. */}}
{{- define "queen-proxy.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "queen-proxy.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "queen-proxy.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "queen-proxy.selector" -}}
app.kubernetes.io/name: {{ include "queen-proxy.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "queen-proxy.labels" -}}
{{ include "queen-proxy.selector" . }}
app.kubernetes.io/component: proxy
app.kubernetes.io/part-of: queen
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "queen-proxy.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "queen-proxy.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* The secret with the GOOGLE_ variables. */}}
{{- define "queen-proxy.googleSecret" -}}
{{- default (printf "queen-mq-proxy-google-%s" .Values.env) .Values.googleAuth.secretName }}
{{- end }}

{{/* Mistakes that the schema cannot see. */}}
{{- define "queen-proxy.check" -}}
{{- if and .Values.httpRoute.enabled (not .Values.proxyHostName) }}
{{- fail "httpRoute.enabled needs proxyHostName, the host name under which browsers reach the proxy" }}
{{- end }}
{{- range $name := list "PORT" "QUEEN_SERVER_URL" "PG_HOST" "PG_PORT" "PG_DB" "PG_USE_SSL" "PG_SSL_REJECT_UNAUTHORIZED" }}
{{- if hasKey $.Values.settings $name }}
{{- fail (printf "settings.%s is set by the chart: use the value it is made from (postgres, queenServerUrl)" $name) }}
{{- end }}
{{- end }}
{{- range $name := list "PG_PASSWORD" "JWT_SECRET" "GOOGLE_CLIENT_SECRET" "INTERNAL_JWT_SIGNING_KEY" "INTERNAL_JWT_PRIVATE_KEY_PEM" }}
{{- if hasKey $.Values.settings $name }}
{{- fail (printf "settings.%s is a secret: put it into a Secret that envFrom names" $name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Whole numbers of a values file arrive as floats: 600000 must not become 6e+05. */}}
{{- define "queen-proxy.text" -}}
{{- if kindIs "float64" . }}
{{- if eq . (floor .) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}
{{- else }}{{ . }}
{{- end }}
{{- end }}
