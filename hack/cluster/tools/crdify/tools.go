//go:build tools

// Package tools pins crdify, which compares the CRDs with those of the last release.
package tools

import _ "sigs.k8s.io/crdify"
