{{/*
Releases beside each other. A release needs a namespace of its own (every name in it is fixed: Deployment, Lease, Secret of the hub),
namespaces to serve that no other release serves, and crds.install in one release only.

Each refusal below comes before Helm's own error about ownership, and names the way out. `lookup` finds nothing in `helm template`,
so these speak on a cluster only. Each looks only at what the installer needs rights on anyway: a lookup that is forbidden would
end the installation.
*/}}

{{/* `name in namespace place` of the other release that an object belongs to. Empty: there is no object, it is ours, or Helm has no part in it. */}}
{{- define "epochkv.otherRelease" -}}
{{- $annotations := dig "metadata" "annotations" dict .object | default dict -}}
{{- $name := index $annotations "meta.helm.sh/release-name" -}}
{{- $place := index $annotations "meta.helm.sh/release-namespace" -}}
{{- if and $name (or (ne $name .root.Release.Name) (ne $place .root.Release.Namespace)) -}}
{{- printf "%s in namespace %s" $name $place -}}
{{- end -}}
{{- end }}

{{- define "epochkv.refuseSameNamespace" -}}
{{- $object := lookup "v1" "ServiceAccount" .Release.Namespace "epochkv-operator" -}}
{{- with include "epochkv.otherRelease" (dict "object" $object "root" .) -}}
{{- fail (printf "release %s is there already, and a namespace holds one release of EpochKV: install this one into a namespace of its own (--namespace)" .) -}}
{{- end -}}
{{- end }}

{{/* Two operators that serve one namespace undo each other's work. */}}
{{- define "epochkv.refuseSharedNamespaces" -}}
{{- $root := . -}}
{{- if or .Values.crds.install (not .Values.watchNamespaces) -}}
{{- $object := lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" "epochkv-operator" -}}
{{- with include "epochkv.otherRelease" (dict "object" $object "root" $root) -}}
{{- fail (printf "release %s serves every namespace of the cluster, so there is nothing left to serve: use that release, or first set watchNamespaces in it" .) -}}
{{- end -}}
{{- end -}}
{{- range $namespace := .Values.watchNamespaces -}}
{{- $object := lookup "rbac.authorization.k8s.io/v1" "Role" $namespace "epochkv-operator" -}}
{{- with include "epochkv.otherRelease" (dict "object" $object "root" $root) -}}
{{- fail (printf "namespace %s is served by release %s already: leave it out of watchNamespaces here, or there" $namespace .) -}}
{{- end -}}
{{- end -}}
{{- if not .Values.watchNamespaces -}}
{{/* Every operator has a PodDisruptionBudget, and a cluster has few of those. */}}
{{- range (dig "items" list (lookup "policy/v1" "PodDisruptionBudget" "" "")) -}}
{{- $labels := .metadata.labels | default dict -}}
{{- if and (eq (index $labels "app.kubernetes.io/name" | default "") "epochkv") (eq (index $labels "app.kubernetes.io/component" | default "") "operator") -}}
{{- with include "epochkv.otherRelease" (dict "object" . "root" $root) -}}
{{- fail (printf "this release would serve every namespace, and release %s serves some of them: set watchNamespaces to namespaces that no other release serves" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "epochkv.refuseForeignCrds" -}}
{{- $root := . -}}
{{- range $name := list "kvcachepools.epochkv.io" "inferenceengines.epochkv.io" -}}
{{- $object := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $name -}}
{{- if $object -}}
{{- $take := printf "kubectl annotate --overwrite crd kvcachepools.epochkv.io inferenceengines.epochkv.io meta.helm.sh/release-name=%s meta.helm.sh/release-namespace=%s && kubectl label --overwrite crd kvcachepools.epochkv.io inferenceengines.epochkv.io app.kubernetes.io/managed-by=Helm" $root.Release.Name $root.Release.Namespace -}}
{{- with include "epochkv.otherRelease" (dict "object" $object "root" $root) -}}
{{- fail (printf "CustomResourceDefinition %s belongs to release %s. Set crds.install=false, and upgrade that release first when this chart is newer. If that release is gone, this one can take over: %s" $name . $take) -}}
{{- end -}}
{{- if not (index ($object.metadata.annotations | default dict) "meta.helm.sh/release-name") -}}
{{- fail (printf "CustomResourceDefinition %s exists, and no release of Helm owns it. Set crds.install=false and go on applying it as you did, or let this release take over: %s" $name $take) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* With crds.install=false, an upgrade takes CRDs that are not kept out of the release: Helm would delete them, with every pool and engine. */}}
{{- define "epochkv.refuseToDropCrds" -}}
{{- $root := . -}}
{{- range $name := list "kvcachepools.epochkv.io" "inferenceengines.epochkv.io" -}}
{{- $annotations := dig "metadata" "annotations" dict (lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $name) | default dict -}}
{{- $ours := and (eq (index $annotations "meta.helm.sh/release-name" | default "") $root.Release.Name) (eq (index $annotations "meta.helm.sh/release-namespace" | default "") $root.Release.Namespace) -}}
{{- if and $ours (ne (index $annotations "helm.sh/resource-policy" | default "") "keep") -}}
{{- fail (printf "crds.install=false would delete CustomResourceDefinition %s, with every object of it in the cluster: first run an upgrade with crds.install=true and crds.keep=true" $name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "epochkv.refusals" -}}
{{- if and .Values.crds.install (not .Values.crds.keep) .Values.watchNamespaces -}}
{{- fail "crds.keep=false would delete the pools and engines of every namespace when this release is uninstalled, and it serves only watchNamespaces: leave crds.keep at true, and delete the CustomResourceDefinitions yourself when no release needs them" -}}
{{- end -}}
{{- include "epochkv.refuseSameNamespace" . -}}
{{- include "epochkv.refuseSharedNamespaces" . -}}
{{- if .Values.crds.install -}}
{{- include "epochkv.refuseForeignCrds" . -}}
{{- else if and .Release.IsUpgrade (not .Values.watchNamespaces) -}}
{{- include "epochkv.refuseToDropCrds" . -}}
{{- end -}}
{{- end }}
