{{- define "epochkv.selector" -}}
app.kubernetes.io/name: epochkv
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "epochkv.labels" -}}
{{ include "epochkv.selector" . }}
app.kubernetes.io/part-of: epochkv
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "epochkv.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* What the operator may do where it serves pools and engines; the list stands in operator/epochkv_operator/kube/client.py. */}}
{{- define "epochkv.rules" -}}
- apiGroups: [epochkv.io]
  resources: [kvcachepools, inferenceengines]
  verbs: [get, list, watch]
- apiGroups: [epochkv.io]
  resources: [kvcachepools/status, inferenceengines/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
# Every pool and engine has these as long as it lives; then the garbage collector takes them.
- apiGroups: [""]
  resources: [configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# The names of the pools' Secrets are not known beforehand, so they cannot be listed here; there is no list and no watch.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, update, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}

{{/* The operator sees its own Lease through a watch, as a proof that its watches are alive. */}}
{{- define "epochkv.canaryRule" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [epochkv-operator]
  verbs: [list, watch]
{{- end }}
