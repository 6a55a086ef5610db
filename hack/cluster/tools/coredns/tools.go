//go:build tools

// Package tools pins CoreDNS for the local cluster.
package tools

import _ "github.com/coredns/coredns"
