{{- define "epochkv.selector" -}}
app.kubernetes.io/name: epochkv
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "epochkv.labels" -}}
{{ include "epochkv.selector" . }}
{{ include "epochkv.commonLabels" . }}
{{- end }}

{{- define "epochkv.commonLabels" -}}
app.kubernetes.io/part-of: epochkv
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* A digest wins over the tag: it names one image for ever. */}}
{{- define "epochkv.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Image of pools and engines that name none. Arguments: the root, `store` or `engine`, and the value. */}}
{{- define "epochkv.defaultImage" -}}
{{- $root := index . 0 -}}
{{- index . 2 | default (printf "epochkv/%s:%s" (index . 1) ($root.Values.image.tag | default $root.Chart.AppVersion)) -}}
{{- end }}

{{/* Pod Security `restricted`. */}}
{{- define "epochkv.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "epochkv.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Where `helm test` puts or finds its pool: a namespace that this release serves. */}}
{{- define "epochkv.testNamespace" -}}
{{- $served := .Values.watchNamespaces | default (list .Release.Namespace) -}}
{{- .Values.test.namespace | default (has .Release.Namespace $served | ternary .Release.Namespace (first $served)) -}}
{{- end }}

{{- /* Of the test's pod and of its own pool, which Helm deletes: a name that nobody has given to a pool. */ -}}
{{- define "epochkv.testName" -}}
epochkv-test-{{ printf "%s/%s" .Release.Namespace .Release.Name | sha256sum | trunc 8 }}
{{- end }}

{{- define "epochkv.testPool" -}}
{{- .Values.test.pool | default (include "epochkv.testName" .) -}}
{{- end }}

{{- define "epochkv.testSelector" -}}
app.kubernetes.io/name: epochkv
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end }}

{{- define "epochkv.testLabels" -}}
{{ include "epochkv.testSelector" . }}
{{ include "epochkv.commonLabels" . }}
{{- end }}

{{/* What the operator may do where it serves pools and engines; the list stands in operator/epochkv_operator/kube/resources.py. */}}
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
# Kinds of other projects, used where the cluster serves them.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
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
