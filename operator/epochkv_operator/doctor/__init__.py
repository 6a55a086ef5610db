"""What `epochkv doctor` looks at in a cluster. Nothing is written: the only requests that are no reads are access reviews.

`cluster` reads, once for all checks. Each other module has a subject: pure `judge_*` functions, and what hands them what was read.
"""
