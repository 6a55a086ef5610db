//go:build tools

// Package tools pins promtool, which runs the tests of the chart's alerts.
package tools

import _ "github.com/prometheus/prometheus/cmd/promtool"
