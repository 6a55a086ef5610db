{{- define "epochkv.selector" -}}
app.kubernetes.io/name: epochkv
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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
{{- /* Flux adds the digest of an OCI chart to its version, behind a plus, which no label may have. */}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* A digest wins over the tag: it names one image for ever. */}}
{{- define "epochkv.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Image of pools and engines that name none: beside the operator's own. Arguments: the root, `store`, `engine` or `connector`, and the value. */}}
{{- define "epochkv.defaultImage" -}}
{{- $root := index . 0 -}}
{{- index . 2 | default (printf "%s%s:%s" (trimSuffix "operator" $root.Values.image.repository) (index . 1) ($root.Values.image.tag | default $root.Chart.AppVersion)) -}}
{{- end }}

{{/* Pod Security `restricted`. */}}
{{- define "epochkv.podSecurity" -}}
runAsNonRoot: true
{{- if eq .Values.podSecurity "restricted" }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- end }}
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
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: test
{{- end }}

{{- define "epochkv.testLabels" -}}
{{ include "epochkv.testSelector" . }}
{{ include "epochkv.commonLabels" . }}
{{- end }}

{{- /* Of an admission policy, which is of the whole cluster: releases of some namespaces stand beside each other. */}}
{{- define "epochkv.policyName" -}}
{{- $root := index . 0 -}}
epochkv-{{ index . 1 }}{{ with $root.Values.watchNamespaces }}-{{ $root.Release.Namespace }}{{ end }}
{{- end -}}
