"""Taking stores away without losing what they hold."""
