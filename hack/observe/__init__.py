"""What people see of EpochKV: the table of its metrics, and what is generated from it (a page, the boards of Grafana)."""
