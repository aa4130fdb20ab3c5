{{- /* Name of the chart in labels and names. */ -}}
{{- define "paceline.chart" -}}
{{- .Values.nameOverride | default "paceline" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* Name of the operator's objects. It is the name of a Service and therefore has 63 characters at
       most; those that add to it have 253. */ -}}
{{- define "paceline.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $chart := include "paceline.chart" . -}}
{{- $release := .Release.Name -}}
{{- if not (contains $chart $release) -}}
{{- $release = printf "%s-%s" $release $chart -}}
{{- end -}}
{{- printf "%s-operator" (trunc 54 $release | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "paceline.selector" -}}
app.kubernetes.io/name: {{ include "paceline.chart" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- /* Labels of every object. Those of the selector cannot be replaced: a Deployment keeps its own for
       ever, and its Service would find nothing. */ -}}
{{- define "paceline.labels" -}}
{{- $own := include "paceline.ownLabels" . | fromYaml -}}
{{- $selector := include "paceline.selector" . | fromYaml -}}
{{- range $value, $labels := dict "commonLabels" .Values.commonLabels "podLabels" .Values.podLabels -}}
{{- range $key, $_ := $labels -}}
{{- if hasKey $selector $key -}}
{{- fail (printf "%s: %s is a label by which the operator's pods are selected; choose another key" $value $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- merge (dict) (.Values.commonLabels | default dict) $own | toYaml -}}
{{- end -}}

{{- define "paceline.ownLabels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Labels of the operator's pods. */ -}}
{{- define "paceline.podLabels" -}}
{{- merge (dict) (.Values.podLabels | default dict) (include "paceline.labels" . | fromYaml) | toYaml -}}
{{- end -}}

{{- define "paceline.image" -}}
{{- $registry := (.Values.global).imageRegistry | default .Values.image.registry -}}
{{- with $registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- .Values.image.repository -}}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}
{{- else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end -}}

{{- define "paceline.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "paceline.name" .) -}}
{{- end -}}

{{- /* Secret with the certificate of /metrics; empty: the operator makes one at its start. */ -}}
{{- define "paceline.certificate" -}}
{{- $with := .Values.metrics.certificate -}}
{{- if $with.certManager.enabled -}}
{{- $with.secretName | default (printf "%s-metrics" (include "paceline.name" .)) -}}
{{- else -}}
{{- $with.secretName -}}
{{- end -}}
{{- end -}}

{{- /* A cluster-wide name that two releases do not share. */ -}}
{{- define "paceline.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "paceline.name" .) -}}
{{- end -}}

{{- define "paceline.priorityClassName" -}}
{{- if .Values.priorityClassName -}}
{{- .Values.priorityClassName -}}
{{- else if .Values.priorityClass.create -}}
{{- include "paceline.clusterName" . -}}
{{- end -}}
{{- end -}}

{{- /* What the operator may do in the namespaces of jobs. Secrets: create only (C2). */ -}}
{{- define "paceline.jobRules" -}}
- apiGroups: [paceline.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [paceline.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
- apiGroups: [paceline.dev]
  resources: [trainingruntimes]
  verbs: [list, watch]
- apiGroups: [paceline.dev]
  resources: [trainingruntimes/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [services]
  resourceNames: [paceline-jobs]
  # patch with create is what server-side apply needs, get tells whose it is; list and delete are
  # for namespaces without jobs.
  verbs: [get, create, patch, list, delete]
- apiGroups: [""]
  resources: [namespaces]
  # The label pod-security.kubernetes.io/enforce, which the job's pods are held to.
  verbs: [get]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  # Whether a claim that a job names is there.
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  # list: the reason that the kubelet gives for a pod that does not start.
  verbs: [create, list]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch, delete]
{{- if .Values.rbac.gangs }}
- apiGroups: [scheduling.k8s.io, scheduling.volcano.sh, scheduling.x-k8s.io, scheduling.run.ai]
  resources: [podgroups]
  verbs: [get, create, patch]
{{- end }}
{{- end -}}
