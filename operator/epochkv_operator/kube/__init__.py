"""Everything that speaks to the API server: client, store, work queue, server-side apply, status writes, Lease, events."""
