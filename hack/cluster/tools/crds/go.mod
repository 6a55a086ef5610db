module epochkv.io/hack/cluster/tools/crds

go 1.26.0

require (
	github.com/kserve/kserve v0.20.0
	github.com/prometheus-operator/prometheus-operator v0.85.0
	github.com/ray-project/kuberay/ray-operator v1.5.0
)
