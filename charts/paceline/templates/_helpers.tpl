{{- define "paceline.name" -}}
{{- if contains "paceline" .Release.Name -}}
{{- printf "%s-operator" .Release.Name | trunc 63 -}}
{{- else -}}
{{- printf "%s-paceline-operator" .Release.Name | trunc 63 -}}
{{- end -}}
{{- end -}}

{{- define "paceline.selector" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "paceline.labels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
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
  resources: [events]
  verbs: [create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch, delete]
{{- if .Values.rbac.gangs }}
- apiGroups: [scheduling.k8s.io, scheduling.volcano.sh, scheduling.x-k8s.io, scheduling.run.ai]
  resources: [podgroups]
  verbs: [get, create, patch]
{{- end }}
{{- end -}}
