# A node of kind for machines that cannot pull kindest/node (hack/images/kind_node.py): Debian, what lies in kind's own module, and
# Kubernetes and kube-router as they were built here. More contexts: `cluster` and `kind` (programs), `source` (kind's module),
# `archives` (images that the node brings along).
ARG BASE_IMAGE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

# Every pod of the control plane is this image, under another name each. Only CoreDNS has no command in kubeadm's manifest.
FROM ${BASE_IMAGE} AS components
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends conntrack iproute2 ipset iptables kmod \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
COPY --from=cluster cluster /usr/local/bin/
COPY --from=kind coredns kube-router /usr/local/bin/
COPY docker/kind/cni.json /etc/kube-router/
RUN for name in etcd kube-apiserver kube-controller-manager kube-proxy kube-scheduler kubectl; do \
      ln -s cluster /usr/local/bin/$name; \
    done
ENTRYPOINT ["coredns"]

FROM components AS node
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends containerd containernetworking-plugins curl e2fsprogs ethtool \
      jq mount nftables pigz procps runc systemd util-linux \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
COPY --from=source images/base/files /
COPY --from=kind kubeadm /usr/bin/
# As kind's Dockerfile does it, for Debian's containerd and CNI plugins. Without CAP_SYS_RESOURCE nothing may lower its oom_score_adj.
RUN chmod 755 /etc /kind /kind/bin /kind/bin/* /usr /usr/local /usr/local/bin /usr/local/bin/clean-install /usr/local/bin/entrypoint \
 && rm -f /lib/systemd/system/multi-user.target.wants/* /etc/systemd/system/*.wants/* /lib/systemd/system/local-fs.target.wants/* \
      /lib/systemd/system/sockets.target.wants/*udev* /lib/systemd/system/sockets.target.wants/*initctl* \
      /lib/systemd/system/basic.target.wants/* /lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service \
 && echo ReadKMsg=no >>/etc/systemd/journald.conf \
 && ln -sf /usr/lib/systemd/systemd /sbin/init \
 && ln -s /usr/local/bin/cluster /usr/bin/kubelet && ln -s /usr/local/bin/cluster /usr/bin/kubectl \
 && for tool in containerd ctr containerd-shim-runc-v2; do ln -s /usr/bin/$tool /usr/local/bin/$tool; done \
 && mkdir -p /opt/cni/bin /etc/cni/net.d /etc/kubernetes/manifests /kind/images /kind/manifests \
 && cp /usr/lib/cni/bridge /usr/lib/cni/host-local /usr/lib/cni/loopback /opt/cni/bin/ \
 && sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' /etc/containerd/config.toml \
 && ctr oci spec | jq '.hooks.createContainer[.hooks.createContainer | length] |= . + {"path": "/kind/bin/mount-product-files.sh"} | del(.process.rlimits)' \
      >/etc/containerd/cri-base.json \
 && kubelet --version | cut -d' ' -f2 | tr -d '\n' >/kind/version \
 && systemctl enable kubelet.service containerd.service undo-mount-hacks.service \
 && systemctl mask systemd-binfmt.service
COPY docker/kind/default-cni.yaml /kind/manifests/
COPY --chmod=755 docker/kind/import-images.sh /kind/bin/
COPY docker/kind/import-images.conf /etc/systemd/system/kubelet.service.d/20-import-images.conf
ARG COMPONENTS
ARG PAUSE
COPY --from=archives ${COMPONENTS} /kind/images/components.tar
COPY --from=archives ${PAUSE} /kind/images/pause.tar
RUN kubeadm config images list --kubernetes-version "$(cat /kind/version)" | grep -v /pause: >/kind/images/names
ENV container=docker
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]
